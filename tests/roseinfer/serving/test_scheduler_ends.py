"""Schedulers: how requests end, fail and leave, and what is left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.errors import PromptError, RoseError, SamplingError
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer import serving
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.text import IncrementalText
from tests.helpers import random_model, random_prompts, small_config, small_engine, uncached_greedy
from tests.late_step import run_late
from tests.roseinfer.serving.test_scheduler import (  # noqa: F401
    LENGTHS,
    Calls,
    assert_all_free,
    engine_of,
    greedy,
    run_to_end,
    tokenizer,
)


class Pieces:
    """A tokenizer whose token i is the i-th of the given strings."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def stream(self) -> Pieces:
        return self

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return ""


def before_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Character by character: the text before the stop string that is completed first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - len(max(ending, key=len))], True
    return text, False


words = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(words, max_size=8), stops=st.lists(words, max_size=3))
def test_text_ends_before_the_first_stop_wherever_tokens_break(pieces: list[str], stops: list[str]) -> None:
    stops = tuple(stops)
    expected, stopped = before_first_stop("".join(pieces), stops)
    text = IncrementalText(Pieces(pieces), stops)
    taken = []
    for i in range(len(pieces)):
        text.push(i)
        taken.append(text.take())
        assert expected.startswith("".join(taken))
        if text.stopped:
            break
    text.finish()
    taken.append(text.take())
    assert ("".join(taken), text.text, text.stopped) == (expected, expected, stopped)


def test_text_without_stop_strings_is_never_held_back() -> None:
    text = IncrementalText(Pieces(["a", "b"]))
    text.push(0)
    assert text.take() == "a"
    text.push(1)
    assert (text.take(), text.take()) == ("b", "")


def test_a_character_in_parts_waits_for_its_last_byte_or_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("né 🙂")
    text = IncrementalText(tokenizer)
    taken = []
    for token in ids:
        text.push(token)
        taken.append(text.take())
    assert "".join(taken) == "né 🙂"
    assert "�" not in "".join(taken) and "" in taken
    cut = IncrementalText(tokenizer)
    for token in ids[:-1]:
        cut.push(token)
    assert cut.take() == "né "
    cut.finish()
    assert "né " + cut.take() == cut.text == tokenizer.decode(ids[:-1])


def test_stop_strings_end_a_request_and_its_text(tokenizer: Tokenizer) -> None:
    engine = engine_of(3, tokenizer)
    prompts = random_prompts([3, 5, 2], vocab_size=tokenizer.vocab_size)
    whole = OfflineScheduler(engine).run(prompts, greedy(30))
    stops = [output.text[8:11] for output in whole]
    params = [greedy(30, stop=[stop, "never there"]) for stop in stops[:2]] + [greedy(30)]
    cut = OfflineScheduler(engine).run(prompts, params)
    for output, stop, reference in zip(cut[:2], stops, whole, strict=False):
        assert output.text == reference.text.partition(stop)[0]
        assert output.finish_reason == "stop"
        assert len(output.token_ids) < 30
        assert output.token_ids == reference.token_ids[: len(output.token_ids)]
        assert stop in tokenizer.decode(output.token_ids)
        assert len(output.metrics.token_times) == len(output.token_ids)
    assert (cut[2].text, cut[2].finish_reason) == (whole[2].text, "length")
    assert_all_free(engine)


def test_a_stop_string_that_never_comes_changes_nothing(tokenizer: Tokenizer) -> None:
    engine = engine_of(3, tokenizer)
    plain = OfflineScheduler(engine).run([[9, 8]], greedy(20))[0]
    begun = plain.text[-1] + "then something else"
    watched = OfflineScheduler(engine).run([[9, 8]], greedy(20, stop=begun))[0]
    assert (watched.text, watched.finish_reason) == (plain.text, "length")


@pytest.mark.parametrize("stop", [None, "never there"])
def test_the_end_of_sequence_is_a_token_and_no_text(tokenizer: Tokenizer, stop: str | None) -> None:
    config = {"vocab_size": tokenizer.vocab_size}
    tokens = uncached_greedy(random_model(0, small_config(**config)), [9, 8], 6)
    assert tokens.index(tokens[5]) == 5
    model = random_model(0, small_config(eos_token_ids=(tokens[5],), **config))
    engine = small_engine(model, tokenizer=tokenizer, recipe="dense")
    until_eos = SamplingParams(temperature=0.0, max_tokens=20, stop=stop)
    output = OfflineScheduler(engine).run([[9, 8]], until_eos)[0]
    assert (output.token_ids, output.finish_reason) == (tokens, "stop")
    assert output.text == tokenizer.decode(tokens[:5])
    ignoring = OfflineScheduler(engine).run([[9, 8]], greedy(20, stop=stop))[0]
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (20, "length")


@pytest.mark.parametrize("rung", ["dense", "cuda_graph", "resident_step", BEST_RUNG])
def test_the_first_of_several_ends_of_sequence_stops_a_request(rung: str) -> None:
    prompts = [[9, 8], [3], [5, 6, 7], [40, 2, 1, 8]]
    plain = [uncached_greedy(random_model(0), prompt, 12) for prompt in prompts]
    ends = (19, 1, 77)
    model = random_model(0, small_config(eos_token_ids=ends))
    engine = small_engine(model, recipe=rung)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = OfflineScheduler(engine).run(prompts, params)
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends), 12) for row in plain]
    assert [output.token_ids for output in outputs] == [
        row[:n] for row, n in zip(plain, lengths, strict=True)
    ]
    assert lengths == [5, 5, 1, 11] and {output.finish_reason for output in outputs} == {"stop"}
    assert {output.token_ids[-1] for output in outputs} == set(ends)
    ignoring = OfflineScheduler(engine).run(prompts, greedy(12))
    assert [output.token_ids for output in ignoring] == plain
    assert_all_free(engine)


def test_text_is_decoded_only_when_it_is_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or real(ids))
    output = OfflineScheduler(engine_of(3, tokenizer)).run([[1]], greedy(4))[0]
    assert decoded == []
    assert output.text == output.text == real(output.token_ids)
    assert decoded == [output.token_ids]


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    engine = engine_of()
    assert OfflineScheduler(engine).run([[1]], greedy(2))[0].text is None
    with pytest.raises(SamplingError, match="stop strings need a tokenizer"):
        OnlineScheduler(engine).add_request([1], greedy(2, stop="x"))
    with pytest.raises(PromptError, match="a prompt of text needs a tokenizer"):
        engine.encode("x")


def test_a_request_that_still_runs_has_no_output_yet() -> None:
    running = engine_of().make_sequence([1], greedy(2))
    with pytest.raises(RoseError, match=f"request {running.request_id} has not ended yet"):
        RequestOutput.of(running, None)


# Prompts in chunks, and steps that run ahead

RECIPES = ["dense", "one_table"]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [uncached_greedy(random_model(0), prompt, 14) for prompt in random_prompts(LENGTHS)]


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize(("budget", "policy"), [(1, "fifo"), (7, "pack"), (16, "fifo")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_and_steps_ahead_give_the_tokens_of_each_request_alone(
    recipe: str, budget: int, policy: str, run_ahead: int, expected: list[list[int]]
) -> None:
    engine = engine_of(recipe=recipe, num_kv_blocks=11, max_batch_size=4)
    prompts = random_prompts(LENGTHS)
    counts = [1 + 3 * i % 14 for i in range(len(prompts))]
    if run_ahead:
        run_late(engine, run_ahead)
    config = SchedulerConfig(prefill_token_budget=budget, admission_policy=policy)
    outputs = OfflineScheduler(engine, config).run(prompts, [greedy(n) for n in counts])
    for tokens, n, output in zip(expected, counts, outputs, strict=True):
        assert output.token_ids == tokens[:n]
        assert len(output.metrics.token_times) == n
    assert_all_free(engine)


@pytest.mark.parametrize(("num_kv_blocks", "n_hits"), [(14, 30), (40, 100)], ids=["evicting", "ample"])
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_of_prompts_with_a_cached_prefix_give_the_same_tokens(
    recipe: str, run_ahead: int, num_kv_blocks: int, n_hits: int
) -> None:
    engine = engine_of(recipe=recipe, num_kv_blocks=num_kv_blocks, max_batch_size=3, prefix_cache=True)
    long = random_prompts([40])[0]
    prompts = [long, long[:25] + [5, 6], long[:30], long[:8], [3, 4], long[:39] + [1], long]
    if run_ahead:
        run_late(engine, run_ahead)
    outputs = OfflineScheduler(engine, SchedulerConfig(prefill_token_budget=9)).run(prompts, greedy(12))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == uncached_greedy(engine.model, prompt, 12)
    assert engine.prefix_cache.hit_tokens > n_hits
    engine.prefix_cache.clear()
    assert_all_free(engine)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_prompt_is_prefilled_at_once_while_nobody_decodes_and_in_chunks_while_somebody_does(
    run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(num_kv_blocks=40)
    prompts = random_prompts([40, 36, 3])
    expected = [
        uncached_greedy(engine.model, prompt, n) for prompt, n in zip(prompts, (20, 3, 4), strict=True)
    ]
    if run_ahead:
        run_late(engine, run_ahead)
    calls = Calls(engine, monkeypatch)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_chunk=7))
    ids = [scheduler.add_request(prompts[0], greedy(20))]
    while scheduler.decode_steps < 2:
        scheduler.step()
    assert calls.chunks == [[40]]
    n_begun = len(calls.log)
    ids += [scheduler.add_request(prompt, greedy(n)) for prompt, n in zip(prompts[1:], (3, 4), strict=True)]
    run_to_end(scheduler)
    assert calls.chunks[1:] == [[7]] * 5 + [[1, 3]]
    names = [name for name, _ in calls.log[n_begun:]]
    beside = names[: len(names) - names[::-1].index("prefill")]
    assert beside == ["decode", "prefill"] * 6
    assert [scheduler.take_result(i).token_ids for i in ids] == expected
    assert_all_free(engine)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_running_sequences_get_a_token_in_every_iteration_while_a_long_prompt_is_prefilled(
    run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(num_kv_blocks=40)
    if run_ahead:
        run_late(engine, run_ahead)
    calls = Calls(engine, monkeypatch)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=5))
    short = scheduler.add_requests([[1], [2, 3]], greedy(30))
    while scheduler.decode_steps < 2:
        scheduler.step()
    n_before = len(calls.chunks)
    long = scheduler.add_request([4] * 48, greedy(3))
    iterations = [[s.request_id for s in scheduler.step()] for _ in range(9)]
    assert iterations == [short] * 9
    assert calls.chunks[n_before:] == [[5]] * 9
    assert scheduler.n_active == 3 and scheduler.n_waiting == 0
    run_to_end(scheduler)
    assert scheduler.take_result(long).token_ids == uncached_greedy(engine.model, [4] * 48, 3)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_request_can_be_cancelled_in_the_middle_of_its_prompt(run_ahead: int) -> None:
    engine = engine_of(num_kv_blocks=10)
    if run_ahead:
        run_late(engine, run_ahead)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=20))
    short, long = scheduler.add_requests([[1] * 3, [2] * 50], greedy(9))
    scheduler.step()
    assert (scheduler.n_active, scheduler.n_waiting) == (2, 0)
    assert engine.blocks.num_free_blocks() < engine.num_kv_blocks - 1
    assert scheduler.cancel(long)
    assert (scheduler.n_active, engine.blocks.num_free_blocks()) == (1, engine.num_kv_blocks - 1)
    cut = scheduler.take_result(long)
    assert (cut.finish_reason, cut.token_ids, cut.metrics.ttft) == ("cancelled", [], None)
    again = scheduler.add_request([2] * 50, greedy(9))  # fits only if the reservation is gone, too
    scheduler.step()
    assert scheduler.n_waiting == 0
    run_to_end(scheduler)
    assert scheduler.take_result(short).token_ids == uncached_greedy(engine.model, [1] * 3, 9)
    assert scheduler.take_result(again).token_ids == uncached_greedy(engine.model, [2] * 50, 9)
    assert_all_free(engine)


def test_an_error_in_the_middle_of_a_prompt_leaks_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=10))
    request = scheduler.add_request([1] * 25, greedy(3))
    scheduler.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine, "begin_prefill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.step()
    assert scheduler.take_result(request).finish_reason == "failed"
    assert_all_free(engine)


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_tokens_of_an_ended_sequence_that_are_still_on_their_way_never_reach_it(
    run_ahead: int, tokenizer: Tokenizer
) -> None:
    engine = engine_of(3, tokenizer, max_batch_size=4)
    prompts = random_prompts([3, 5, 2, 4, 1], vocab_size=tokenizer.vocab_size)
    whole = OfflineScheduler(engine).run(prompts, greedy(30))
    params = [greedy(30, stop=output.text[8:11]) for output in whole[:3]] + [greedy(30)] * 2
    expected = OfflineScheduler(engine).run(prompts, params)
    late = run_late(engine, run_ahead)
    scheduler = OnlineScheduler(engine)
    ids = scheduler.add_requests(prompts, params)
    while len(scheduler.finished) < 3:
        scheduler.step()
    cancelled = next(i for i in ids if i not in scheduler.finished)
    scheduler.cancel(cancelled)
    run_to_end(scheduler)
    assert late.overtaken > 0
    for request, reference in zip(ids, expected, strict=True):
        output = scheduler.take_result(request)
        n = len(output.token_ids)
        if request == cancelled:
            assert output.token_ids == reference.token_ids[:n]
        else:
            assert (output.token_ids, output.text) == (reference.token_ids, reference.text)
            assert output.finish_reason == reference.finish_reason
        assert len(output.metrics.token_times) == n
    assert_all_free(engine)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_a_scheduler_leaves_as_many_steps_unfinished_as_the_engine_runs_ahead(run_ahead: int) -> None:
    engine = engine_of()
    late = run_late(engine, run_ahead)
    scheduler = OfflineScheduler(engine)
    request = scheduler.add_request([1, 2], greedy(9))
    begun = []
    while scheduler.has_unfinished:
        scheduler.step()
        begun.append(len(late._begun))
    assert begun[: run_ahead + 1] == [*range(1, run_ahead + 1), run_ahead]
    assert begun[-1] == 0 and late.idle == 1
    assert (scheduler.decode_steps, scheduler.decode_tokens) == (8, 8)
    assert scheduler.decode_time_s == pytest.approx(8e-3)
    assert scheduler.take_result(request).token_ids == uncached_greedy(engine.model, [1, 2], 9)


@pytest.mark.parametrize("rung", ["one_table", "resident_step", BEST_RUNG])
def test_the_active_view_is_built_once_and_not_for_every_step(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    class Counted(serving.scheduler.ActiveView):
        def __init__(self, listed: list[Sequence], requests: dict[int, Sequence]) -> None:
            super().__init__(listed, requests)
            built.append(listed)

    monkeypatch.setattr(serving.scheduler, "ActiveView", Counted)
    scheduler = OfflineScheduler(engine_of(recipe=rung))
    scheduler.run([[1], [2, 3], [4]], greedy(45))
    assert scheduler.decode_steps == 44
    assert len(built) <= 4  # the prompts, the first tokens' steps, and the ends


def test_several_tokens_of_a_sequence_in_one_iteration_are_told_once() -> None:
    engine = engine_of()
    run_late(engine, 3)
    scheduler = OnlineScheduler(engine)
    first, second = scheduler.add_requests([[1, 2], [3]], [greedy(9), greedy(4)])
    told = []
    while scheduler.has_unfinished:
        told.append([s.request_id for s in scheduler.step()])
    assert all(len(ids) == len(set(ids)) for ids in told)
    assert sum(map(len, told)) < 9 + 4  # some iterations took several tokens
    assert [len(scheduler.take_result(i).token_ids) for i in (first, second)] == [9, 4]


def test_an_error_while_tokens_are_collected_ends_the_active_requests_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of()
    late = run_late(engine, 1)
    scheduler = OnlineScheduler(engine, SchedulerConfig(max_batch_size=2))
    first, second, third = scheduler.add_requests([[1], [2], [3]], greedy(4))
    scheduler.step()

    def lost(leave: int = 0):
        raise SamplingError("the model's logits are not finite")
        yield

    with monkeypatch.context() as broken:
        broken.setattr(late, "collect", lost)
        with pytest.raises(SamplingError, match="not finite"):
            scheduler.step()
    assert [scheduler.take_result(i).finish_reason for i in (first, second)] == ["failed"] * 2
    assert_all_free(engine)
    run_to_end(scheduler)
    assert scheduler.take_result(third).token_ids == uncached_greedy(engine.model, [3], 4)
    assert scheduler.decode_tokens == 3
