"""Use from threads and from an event loop, which goes on turning meanwhile."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rosellm import LLM, SamplingParams
from rosellm.errors import PromptError, SamplingError
from rosellm.roseinfer.serving.stream import merged
from rosellm.roseinfer.serving.streaming import ClosedError, StreamingManager

PROMPTS = ["import os\n", "def main(", "class "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
N_STREAMS = 24  # of which four run together


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", max_batch_size=4, num_kv_blocks=64)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    return [one.outputs[0].text for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def generate(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_to_thread_generates_while_the_loop_turns(llm, texts):
    async def main() -> tuple[list[str], int]:
        n_ticks = 0
        threads = asyncio.gather(*(asyncio.to_thread(generate, llm, prompt) for prompt in PROMPTS))
        while not threads.done():
            await asyncio.sleep(0.001)
            n_ticks += 1
        return await threads, n_ticks

    got, n_ticks = asyncio.run(main())
    assert got == texts
    assert n_ticks > 5


def test_many_coroutines_stream_at_once_and_none_starves(llm, texts):
    order = []

    async def read(manager: StreamingManager, index: int) -> str:
        text = ""
        async for piece in manager.stream(PROMPTS[index % 3], GREEDY):
            order.append(index)
            text += piece
        return text

    async def main() -> list[str]:
        with StreamingManager(llm) as manager:
            got = await asyncio.gather(*(read(manager, i) for i in range(N_STREAMS)))
            assert not manager._streams  # they are forgotten
            return got

    assert asyncio.run(main()) == texts * (N_STREAMS // 3)
    assert order[:12] != sorted(order[:12])  # pieces of one come between those of another
    assert max(order[: len(order) // 4]) < N_STREAMS // 2  # requests that wait do not hold up those that run
    assert generate(llm, PROMPTS[0]) == texts[0]  # the engine is free again


def test_a_coroutine_reads_several_replies_as_their_pieces_arrive_and_learns_each_end(llm, texts):
    async def main() -> list[tuple[int, str | None]]:
        with StreamingManager(llm) as manager:
            pieces = [one async for one in merged([manager.stream(prompt, GREEDY) for prompt in PROMPTS])]
            assert not manager._streams
            return pieces

    pieces = asyncio.run(main())
    own = [[piece for index, piece in pieces if index == i] for i in range(len(PROMPTS))]
    assert ["".join(texts) for *texts, _ in own] == texts and all(one[-1] is None for one in own)
    assert {index for index, _ in pieces[:6]} == {0, 1, 2}


@pytest.mark.parametrize("end", ["a reply fails", "the reader goes away"])
def test_the_replies_that_a_coroutine_reads_together_are_cancelled_together(llm, end):
    async def main() -> None:
        with StreamingManager(llm) as manager:
            replies = [manager.stream(prompt, ENDLESS).start() for prompt in PROMPTS]
            streams, pieces = [reply.stream for reply in replies], merged(replies)
            assert await anext(pieces)
            if end == "a reply fails":
                manager._orders.put(lambda: manager._end(streams[1], SamplingError("no token")))
                with pytest.raises(SamplingError, match="no token"):
                    async for _ in pieces:
                        pass
            else:
                await pieces.aclose()
            for stream in streams[::2]:
                assert await asyncio.to_thread(stream.ended.wait, 60)
                assert stream.outcome.finish_reason == "cancelled"
            assert not manager._streams

    asyncio.run(main())


@pytest.mark.parametrize("leave", ["close", "cancel"])
def test_a_coroutine_that_leaves_cancels_its_request(llm, leave):
    async def main() -> None:
        with StreamingManager(llm) as manager:
            if leave == "close":
                pieces = manager.stream("class ", ENDLESS)
                assert await anext(pieces)
                (stream,) = manager._streams.values()
                await pieces.aclose()
            else:
                task = asyncio.create_task(anext(manager.stream("class ", ENDLESS)))
                await asyncio.sleep(0)
                (stream,) = manager._streams.values()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await asyncio.to_thread(stream.ended.wait, 60)
            assert stream.outcome.finish_reason == "cancelled" and not manager._streams

    asyncio.run(main())


def test_a_coroutine_gets_the_errors_of_its_request(llm):
    async def main() -> None:
        manager = StreamingManager(llm)
        with pytest.raises(PromptError, match="empty"):
            await anext(manager.stream("", GREEDY))
        pieces = manager.stream("class ", ENDLESS)
        await anext(pieces)
        await asyncio.to_thread(manager.close)
        with pytest.raises(ClosedError):
            async for _ in pieces:
                pass

    asyncio.run(main())


def test_a_loop_that_was_closed_holds_up_no_other(llm, texts):
    with StreamingManager(llm) as manager:
        loop = asyncio.new_event_loop()
        pieces = manager.stream(PROMPTS[0], ENDLESS)
        loop.run_until_complete(anext(pieces))
        loop.close()
        assert manager.result(manager.add_request(PROMPTS[1], GREEDY), 60).text == texts[1]


def test_a_loop_that_was_closed_is_forgotten(llm, texts):
    async def main() -> str:
        return "".join([piece async for piece in manager.stream(PROMPTS[0], GREEDY)])

    with StreamingManager(llm) as manager:
        assert [asyncio.run(main()) for _ in range(3)] == [texts[0]] * 3
        gc.collect()
        assert len(manager._mailboxes) <= 1  # the worker may still have the last
