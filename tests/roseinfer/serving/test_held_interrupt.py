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
from tests.helpers import random_prompts
from tests.roseinfer.serving.common import assert_all_free, engine_of, greedy

PROMPTS = random_prompts([4, 40, 90, 7, 30], seed=7)


def test_after_a_sigint_the_same_engine_gives_the_same_tokens_and_has_all_its_blocks(tokenizer, monkeypatch):
    options = {"num_kv_blocks": 150, "max_batch_size": 4, "prefix_cache": True, "n_positions": 1100}
    engine = engine_of(3, tokenizer, **options)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    llm = LLM()
    expected = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
    for seconds in (0.03, 0.15):  # 1000 tokens take longer
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


def test_a_second_interrupt_does_not_wait_and_within_another_the_outer_one_holds():
    with pytest.raises(KeyboardInterrupt), held_interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it has waited")
    with pytest.raises(KeyboardInterrupt), held_interrupt(), held_interrupt() as let_through:
        signal.raise_signal(signal.SIGINT)
        let_through()
        pytest.fail("it has waited")


def test_another_handler_is_left_as_it_is():
    def mine(number: int, frame: object) -> None:
        """A program's own handler."""

    before = signal.signal(signal.SIGINT, mine)
    try:
        with held_interrupt() as let_through:
            assert signal.getsignal(signal.SIGINT) is mine
            let_through()
    finally:
        signal.signal(signal.SIGINT, before)
