"""Ctrl-C in ``LLM.generate``: a real SIGINT, whenever it comes, leaves an engine that serves as before."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from rosellm import LLM
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.held_interrupt import held_interrupt
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from tests.helpers import random_model, random_prompts, small_config, small_engine
from tests.roseinfer.serving.common import assert_all_free, engine_of, greedy

PROMPTS = random_prompts([4, 40, 90, 7, 30], seed=7)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_after_a_sigint_the_same_engine_gives_the_same_tokens_and_has_all_its_blocks(
    tokenizer, monkeypatch, prefix_cache
):
    model = random_model(3, small_config(vocab_size=tokenizer.vocab_size, n_positions=1100))
    options = {"num_kv_blocks": 150, "max_batch_size": 4, "prefix_cache": prefix_cache}
    engine = small_engine(model, tokenizer=tokenizer, recipe="resident_step", **options)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    llm = LLM()
    expected = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    for seconds in (0.03, 0.1, 0.2):  # 1000 tokens take longer
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(1000), use_tqdm=False)
            signal.pause()
        assert_all_free(engine)
        assert llm.generate(PROMPTS, greedy(12), use_tqdm=False) == expected


def test_an_interrupt_of_a_run_waits_for_the_end_of_a_step_and_no_longer():
    scheduler = OfflineScheduler(engine_of())

    class Interrupt:
        total = 18

        def update(self, n: int) -> None:
            if scheduler.decode_steps == 3:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        scheduler.run([[1], [2]], greedy(9), Interrupt())
    assert scheduler.decode_steps == 4
    assert not scheduler.has_unfinished and not scheduler.finished


@pytest.mark.parametrize("lets_through", [True, False])
def test_an_interrupt_waits_until_it_is_let_through_or_the_end(lets_through):
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupt() as let_through:
            signal.raise_signal(signal.SIGINT)
            reached.append("past the signal")
            if lets_through:
                let_through()
            reached.append("the end")
        reached.append("not here")
    assert reached == (["past the signal"] if lets_through else ["past the signal", "the end"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait_and_within_another_the_outer_one_holds():
    with pytest.raises(KeyboardInterrupt), held_interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it has waited")
    with pytest.raises(KeyboardInterrupt), held_interrupt(), held_interrupt() as let_through:
        signal.raise_signal(signal.SIGINT)
        let_through()
        pytest.fail("it has waited")


def test_another_thread_and_another_handler_are_left_as_they_are():
    def mine(number: int, frame: object) -> None:
        """A program's own handler."""

    seen = []

    def work() -> None:
        with held_interrupt() as let_through:
            seen.append(signal.getsignal(signal.SIGINT))
            let_through()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, mine)
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler, mine]
