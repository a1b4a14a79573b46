"""Ctrl-C in ``LLM.generate``: a real SIGINT, whenever it comes, leaves an engine that serves as before."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from rosellm.roseinfer.serving.held_interrupt import held_interrupt
from tests.roseinfer.ranks import program

ROOT = Path(__file__).parents[3]
N_INTERRUPTS = 2
SERVED = """
import sys
from rosellm import LLM, SamplingParams

llm = LLM(device="cpu", num_kv_blocks=60, max_batch_size=4, prefix_cache={prefix_cache})
prompts = ["import os\\n" * n for n in (1, 9, 30, 2, 5, 12)]
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
tokens = lambda: [one.outputs[0].token_ids for one in llm.generate(prompts, greedy, use_tqdm=False)]
blocks = llm.engine.blocks
expected, seen = tokens(), 0
for _ in range({n}):
    print("go", flush=True)
    try:
        llm.generate(prompts, long, use_tqdm=False)
    except KeyboardInterrupt:
        seen += 1
    blocks.check_integrity()
    assert blocks.num_free_blocks() + blocks.num_evictable_blocks() == 60, blocks.num_free_blocks()
    assert tokens() == expected
print("interrupted", seen, flush=True)
"""


@pytest.mark.parametrize("prefix_cache", [pytest.param(False, marks=pytest.mark.slow), True])
def test_after_a_sigint_the_same_engine_gives_the_same_tokens_and_has_all_its_blocks(prefix_cache):
    rng = random.Random(7)
    code = SERVED.format(prefix_cache=prefix_cache, n=N_INTERRUPTS)
    with program("-c", code, cwd=ROOT) as process:
        for line in process.stdout:
            if line != "go\n":
                break
            time.sleep(rng.uniform(0.05, 0.4))  # 300 tokens take longer
            process.send_signal(signal.SIGINT)
        said, failed = line, process.stderr.read()
        assert process.wait(60) == 0, failed
    assert said == f"interrupted {N_INTERRUPTS}\n"


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
