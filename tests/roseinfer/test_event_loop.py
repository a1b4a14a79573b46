"""Use from threads and from an event loop, which goes on turning meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rosellm import LLM, SamplingParams
from rosellm.roseinfer.serving.streaming import StreamingManager

PROMPTS = ["import os\n", "def main(", "class "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", max_batch_size=4, num_kv_blocks=64)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    return [one.outputs[0].text for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def generate(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text


async def ticks(done: asyncio.Event) -> int:
    """How often the loop came round until ``done``."""
    n = 0
    while not done.is_set():
        await asyncio.sleep(0.001)
        n += 1
    return n


def test_several_threads_generate_in_turn(llm, texts):
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda prompt: generate(llm, prompt), PROMPTS)) == texts


def test_to_thread_generates_while_the_loop_turns(llm, texts):
    async def main() -> tuple[list[str], int]:
        done = asyncio.Event()
        ticking = asyncio.create_task(ticks(done))
        got = await asyncio.gather(*(asyncio.to_thread(generate, llm, prompt) for prompt in PROMPTS))
        done.set()
        return got, await ticking

    got, n_ticks = asyncio.run(main())
    assert got == texts
    assert n_ticks > 5


async def pieces(manager: StreamingManager, prompt: str) -> AsyncIterator[str]:
    """A stream, piece by piece, without blocking the loop."""
    stream = manager.stream_text(manager.add_request(prompt, GREEDY))
    while (piece := await asyncio.to_thread(next, stream, None)) is not None:
        yield piece


def test_a_streaming_manager_streams_to_several_coroutines_at_once(llm, texts):
    order = []

    async def read(manager: StreamingManager, index: int) -> str:
        text = ""
        async for piece in pieces(manager, PROMPTS[index]):
            order.append(index)
            text += piece
        return text

    async def main() -> list[str]:
        with StreamingManager(llm) as manager:
            return list(await asyncio.gather(*(read(manager, i) for i in range(len(PROMPTS)))))

    assert asyncio.run(main()) == texts
    assert order != sorted(order)  # pieces of one come between those of another
    assert generate(llm, PROMPTS[0]) == texts[0]  # the engine is free again
