"""Steps that draft: the tokens of single steps, whatever was drafted and whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rosellm.roseinfer.cache.device_state import COUNTS, INERT, POSITION, TOKEN, DeviceState
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels import speculation
from rosellm.roseinfer.kernels.speculation import Texts, Verified
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import LADDER
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.steps.pace import LASTING, LONGEST_REST, Pace
from rosellm.roseinfer.steps.planner import Batch, Planner
from rosellm.roseinfer.steps.resident import RUN_AHEAD
from rosellm.roseinfer.steps.speculative import MOST_VERIFIED, SpeculativeStep
from rosellm.roseinfer.steps.worker import Clock
from tests.helpers import FAMILIES, ON_GPU, random_model, random_prompts, small_config, small_engine

N_TOKENS = 30
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": 0},
    "biased": {"temperature": 0.5, "logit_bias": {3: 4.0, 9: -1.0}, "allowed_token_ids": list(range(70))},
    "late": {"temperature": 0.7, "min_tokens": 12, "logprobs": 1},
}
MODELS = {"gpt2": {}} | FAMILIES
DEVICES = ["cpu", ON_GPU]


class Oracle:
    """Drafts the tokens that a request will get, some of them spoilt.

    known: for each prompt, its tokens and those that follow. right: the probability of an unspoilt draft.
    """

    def __init__(self, known: list[list[int]], right: float) -> None:
        self.known, self.right, self.rng = known, right, random.Random(0)
        self.n_drafted = 0

    def propose(self, *, state: Any, texts: Texts, verified: Verified, **launch: Any) -> None:
        speculation.propose_ref(state=state, texts=texts, verified=verified)
        k = verified.n_drafts
        wide = verified.state.rows.view(len(state.rows), k + 1, -1)
        columns = None if verified.columns is None else verified.columns.view(8, len(state.rows), -1)
        for row, position in enumerate(state.positions.tolist()):
            if position < 0 or not texts.wants_drafts[row]:
                continue
            text = texts.tokens[row, : position + 1].tolist()
            (own,) = (one for one in self.known if one[: position + 1] == text)
            n = min(k, int(state.limits[row]) - 2 - position)
            following, rng = own[position + 1 : position + 1 + n], self.rng
            drafts = [token if rng.random() < self.right else 100 - token for token in following]
            wide[row, 1:, POSITION], wide[row, 1:, COUNTS] = INERT, 0
            for i, token in enumerate(drafts, 1):
                wide[row, i] = state.rows[row, : wide.shape[2]]
                wide[row, i, TOKEN], wide[row, i, POSITION] = token, position + i
                if state.counts[row]:
                    wide[row, i, COUNTS] = 1 + verified.copies + row * (k + 1) + i
            if columns is not None:
                columns[1, row] = 1 + len(drafts)
            self.n_drafted += len(drafts)


@pytest.fixture(params=["settled", "in flight"])
def in_flight(request, monkeypatch) -> bool:
    """Whether steps stay in flight for as long as they may, as on a GPU; on a CPU each has ended at once."""
    if request.param == "in flight":
        monkeypatch.setattr(Clock, "has_ended", lambda self: False)
    return request.param == "in flight"


def drafting(engine: Engine, oracle: Oracle | None = None, often: float = 1.0) -> Engine:
    """The engine, which drafts in steps at random, or in all that can; by the oracle, if there is one."""
    rng = random.Random(1)
    engine.step.pace.drafts = lambda rows, accepted, batch: rng.random() < often
    if oracle is not None:
        engine.step.worker.drafting = engine.step.worker.drafting._replace(propose=oracle.propose)
    return engine


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], **limits: Any):
    scheduler = OfflineScheduler(engine, SchedulerConfig(**limits))
    outputs = scheduler.run(prompts, params)
    engine.check_integrity()
    return scheduler, outputs


def wishes(modes: list[str], n: int = N_TOKENS, **more: Any) -> list[SamplingParams]:
    own = [SAMPLED[mode] | more for mode in modes]
    return [SamplingParams(max_tokens=n + i, seed=i, ignore_eos=True, **one) for i, one in enumerate(own)]


def likely(output: RequestOutput) -> list[float]:
    """The tokens, ranks and logprobs of all places, in order."""
    entries = [own for place in output.logprobs or () for own in place.items()]
    return [number for token, own in entries for number in (token, own.rank, own.logprob)]


def model_of(family: str, device: str = "cpu") -> Any:
    return random_model(3, small_config(n_positions=128, **MODELS[family])).to(device)


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("family", MODELS)
def test_every_request_gets_the_tokens_of_single_steps(family, right, in_flight):
    """Of every mode in one batch; k of 1, 7 and 16; prompts in chunks; blocks that run out."""
    model, modes = model_of(family), list(SAMPLED)
    prompts, params = random_prompts([3, 17, 9, 30, 5, 12], seed=4), wishes(modes)
    _, plain = run(small_engine(model), prompts, params)
    expected = [one.token_ids for one in plain]
    known = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    for k, options, limits in (
        (7, {}, {}),
        (1, {"max_batch_size": 3}, {"prefill_chunk": 4}),
        (16, {"num_kv_blocks": 17, "prefix_cache": True}, {}),
    ):
        oracle = Oracle(known, right)
        engine = small_engine(model, recipe="speculative", speculative_tokens=k, **options)
        scheduler, outputs = run(drafting(engine, oracle, 0.7), prompts, params, **limits)
        assert [one.token_ids for one in outputs] == expected
        for one, other in zip(outputs, plain, strict=True):
            assert likely(one) == pytest.approx(likely(other), abs=1e-4)
        after_prefills = len(expected) + scheduler.preemptions
        assert scheduler.decode_tokens == sum(map(len, expected)) - after_prefills
        assert oracle.n_drafted
        if "num_kv_blocks" in options:
            assert scheduler.preemptions


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_requests_get_the_same_logprobs_and_tokens_bitwise(device):
    model = model_of("qwen3", device)
    modes = ["greedy", "drawn", "filtered", "penalised", "biased", "late"]
    prompts, params = random_prompts([3, 70, 9, 5, 30, 12], seed=4), wishes(modes, 25, logprobs=2)
    options = {"deterministic": True, "block_size": 64}
    _, plain = run(small_engine(model, **options), prompts, params)
    known = [prompt + one.token_ids for prompt, one in zip(prompts, plain, strict=True)]
    engine = small_engine(model, recipe="speculative", **options)
    oracle = Oracle(known, 0.8) if device == "cpu" else None
    _, outputs = run(drafting(engine, oracle), prompts, params)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
    assert [one.logprobs for one in outputs] == [one.logprobs for one in plain]
    assert all(len(one.logprobs) == len(one.token_ids) for one in outputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_logits_after_a_drafting_step_are_those_of_the_last_token(family, device):
    model = model_of(family, device)
    prompt = [5, 6, 7, 8] * 4
    engines = [small_engine(model, recipe=rung) for rung in ("split_kv", "speculative")]
    drafting(engines[1])
    plain, fast = (
        engine.make_sequence(prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        for engine in engines
    )
    for engine, sequence in zip(engines, (plain, fast), strict=True):
        engine.prefill([sequence])
    while not fast.is_finished:
        engines[1].decode([fast])
        while plain.n_output < fast.n_output:
            engines[0].decode([plain])
        assert plain.output == fast.output
        logits = [engine.step.last_logits()[0].float().cpu() for engine in engines]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def ending(engine: Engine, prompt: list[int], **wish: Any) -> tuple[list[int], str | None, int]:
    params = SamplingParams(temperature=0.0, max_tokens=40, **wish)
    scheduler, (output,) = run(engine, [prompt], [params])
    return output.token_ids, output.finish_reason, len(output.metrics.token_times)


def test_a_request_ends_where_single_steps_end_it_though_later_drafts_were_accepted():
    """By a stop token that the device knows, by one that only the host knows, and by length."""
    plain = small_engine(random_model(3, small_config(n_positions=128, eos_token_ids=(7,))))
    prompt = random_prompts([9], seed=2)[0]
    tokens = ending(plain, prompt, ignore_eos=True)[0]
    known = [prompt + tokens]
    for stop in sorted(set(tokens[3:]), key=tokens.index)[:4]:
        model = random_model(3, small_config(n_positions=128, eos_token_ids=(stop,)))
        for wish in ({}, {"ignore_eos": True, "stop_token_ids": [stop]}, {"ignore_eos": True}):
            engine = drafting(small_engine(model, recipe="speculative"), Oracle(known, 1.0))
            assert ending(engine, prompt, **wish) == ending(small_engine(model), prompt, **wish)


def test_rows_that_leave_and_come_back_keep_their_texts(in_flight):
    """Sequences pause, are released and start again at random; some get no drafts. Each gets its tokens."""
    model, rng = model_of("llama"), random.Random(5)
    prompts = random_prompts([2, 9, 17, 5, 30, 8, 12], seed=6)
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(min_tokens=n, **greedy) for n in (0, 24, 0, 0, 24, 0, 0)]
    _, plain = run(small_engine(model), prompts, params)
    expected = [one.token_ids for one in plain]
    known = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    options = {"recipe": "speculative", "max_batch_size": 4, "speculative_tokens": 3}
    engine = drafting(small_engine(model, **options), Oracle(known, 0.6), 0.7)
    to_come, there = list(range(len(prompts))), {}
    for _ in range(120):
        if to_come and len(there) < 4 and rng.random() < 0.5:
            index = to_come.pop()
            sequence = engine.make_sequence(prompts[index], params[index])
            engine.begin_prefill([sequence])
            there[sequence] = index
        running = [s for s in there if not s.is_finished and rng.random() < 0.8]
        if running:
            engine.begin_decode(running)
        leave = rng.randint(0, 3)
        list(engine.step.collect(leave))
        planner = engine.step.planner
        if leave == 0:  # what may have been is now known
            planner.settle()
        for sequence in [s for s in planner.sequences if leave == 0]:
            row = planner.batch([sequence]).indices[0]
            assert planner.position[row] == sequence.num_cached_tokens <= planner.reserved[row]
            assert planner.left[row] == sequence.max_length - len(sequence.tokens)
        for sequence in list(there):
            assert sequence.output == expected[there[sequence]][: sequence.n_output]
            if sequence.is_finished or rng.random() < 0.03:
                engine.release(sequence)
                index = there.pop(sequence)
                if not sequence.is_finished:
                    to_come.append(index)
        engine.check_integrity()
    assert len(to_come) < len(prompts) - 2


@pytest.mark.parametrize(("k", "mode"), [(1, "drawn"), (7, "penalised"), (7, "biased"), (16, "drawn")])
def test_a_request_whose_drafts_are_all_right_takes_as_few_steps_as_there_can_be(k, mode):
    model, prompt = model_of("qwen2"), random_prompts([9], seed=2)[0]
    params = wishes([mode], n=40)
    plain = run(small_engine(model), [prompt], params)[1][0].token_ids
    engine = small_engine(model, recipe="speculative", speculative_tokens=k)
    scheduler, (output,) = run(drafting(engine, Oracle([prompt + plain], 1.0)), [prompt], params)
    assert output.token_ids == plain
    assert scheduler.decode_steps == -(-39 // (k + 1))  # the first token is the prefill's


def test_a_row_near_its_end_takes_plain_steps_while_drafting_ones_are_in_flight(in_flight):
    """The host only knows how many tokens there may be by then; it reserves none beyond the last."""
    model, prompt = model_of("gpt2"), random_prompts([9], seed=2)[0]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 9, 12, 24)]
    plain = [one.token_ids for one in run(small_engine(model), [prompt] * 4, params)[1]]
    for switch in range(4):
        engine = drafting(small_engine(model, recipe="speculative"), Oracle([prompt + plain[-1]], 0.5))
        kinds = iter([True] * switch + [False, True] * 40)
        engine.step.pace.drafts = lambda rows, accepted, batch, kinds=kinds: next(kinds)
        assert [one.token_ids for one in run(engine, [prompt] * 4, params)[1]] == plain


def test_a_step_whose_last_choice_fails_gives_the_tokens_before_it_and_harms_no_other_request(in_flight):
    model, prompts = model_of("gpt2"), [[5, 6, 7] * 4, [9, 8, 7]]
    params = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 2
    plain = [one.token_ids for one in run(small_engine(model), prompts, params)[1]]
    known = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    engine = drafting(small_engine(model, recipe="speculative"), Oracle(known, 1.0))
    accept = engine.step.worker._accept

    def accept_all_but_one(hidden, state, verified, mode):
        hidden = hidden.clone()
        hidden[verified.state.positions == 17] = float("nan")
        accept(hidden, state, verified, mode)

    engine.step.worker._accept = accept_all_but_one
    failed, other = run(engine, prompts, params)[1]
    assert failed.finish_reason == "failed" and failed.token_ids == plain[0][:6]
    assert other.token_ids[:14] == plain[1][:14]


def test_logits_of_a_batch_leave_out_a_sequence_released_while_its_step_ran(in_flight):
    engine = drafting(small_engine(model_of("gpt2"), recipe="speculative"))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    both = [engine.make_sequence([5, 6, 7] * 4, params) for _ in range(2)]
    engine.prefill(both)
    engine.begin_decode(both)
    engine.release(both[0])
    assert len(engine.step.last_logits()) == 1


def test_rows_that_get_no_drafts_do_not_count_as_rows_whose_drafts_are_accepted():
    engine = small_engine(model_of("gpt2"), recipe="speculative")
    seen: list[float] = []
    engine.step.pace.drafts = lambda rows, accepted, batch: bool(seen.append(accepted)) or True
    wishes_of_each = [{}] + [{"min_tokens": 5}] * 3
    params = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **own) for own in wishes_of_each]
    run(engine, random_prompts([9] * 4, seed=3), params)
    assert 0 < max(seen) <= 0.25


def test_drafts_of_a_text_that_repeats_are_accepted():
    model, prompt = model_of("gpt2"), [11, 12, 13, 14, 15] * 6
    params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)]
    plain = run(small_engine(model), [prompt], params)[1][0].token_ids
    scheduler, (output,) = run(drafting(small_engine(model, recipe="speculative")), [prompt], params)
    assert output.token_ids == plain
    assert scheduler.decode_steps < scheduler.decode_tokens  # its greedy tokens come again, too


def draft_engine(model: Any, draft: Any, k: int = 3, **options: Any) -> Engine:
    recipe = replace(LADDER["speculative"], speculation="draft")
    return small_engine(model, recipe=recipe, speculative_tokens=k, draft=draft, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", MODELS)
def test_all_drafts_of_the_model_itself_are_accepted_after_plain_steps_too(family, device, in_flight):
    """It draws with the noise of the model that verifies, and catches up with the tokens of plain steps.

    A prompt that begins like another one takes its blocks, one of them in part.
    """
    model, k = model_of(family, device), 3
    engine, prompts = draft_engine(model, model, k, prefix_cache=True), random_prompts([5, 17, 70], seed=1)
    run(engine, prompts[1:2], wishes(["greedy"], 2))
    prompts.append(prompts[1] + [9, 8, 7])
    kinds = iter([True, *[False] * 5, True, True] * 20)
    counts = accepting(engine, lambda: next(kinds))
    params = wishes(["greedy", "drawn", "filtered"] * 2, 40)[: len(prompts)]
    _, plain = run(small_engine(model), prompts, params)
    _, drafted = run(engine, prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert counts and all((n == k + 1).all() for n in counts)


@pytest.mark.parametrize("more", [{}, {"prefix_cache": True}, {"num_kv_blocks": 22}, {"deterministic": True}])
@pytest.mark.parametrize("device", DEVICES)
def test_whatever_a_draft_model_drafts_the_tokens_are_those_of_single_steps(device, more, in_flight):
    """In every mode, in chunks, from the prefix cache, after preemption, in deterministic mode."""
    config = small_config(n_positions=128)
    model, draft = (
        random_model(3, config).to(device),
        random_model(4, small_config(n_positions=128)).to(device),
    )
    first = random_prompts([20], seed=2)[0]
    prompts = [first, first + [5, 6], *random_prompts([3, 33, 9], seed=1), first[:17]]
    params = wishes(list(SAMPLED))
    _, plain = run(small_engine(model, **more), prompts, params)
    engine = drafting(draft_engine(model, draft, 5, **more), often=0.6)
    for _ in range(1 + ("prefix_cache" in more)):
        _, drafted = run(engine, prompts, params, prefill_chunk=64 if "deterministic" in more else 16)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def accepting(engine: Engine, kinds: Callable[[], bool] = lambda: True) -> list[np.ndarray]:
    """The tokens that each drafting step gives each row that has enough left; the list grows."""
    planner, counts, accept = engine.step.planner, [], engine.step.planner.accept

    def spy(batch, n, n_drafts):
        planner.settle()
        at = np.array([row.index for row in batch.rows])
        own = (at >= 0) & (planner.left[at] >= n_drafts) & (planner.n_drafts[at] > 0)
        counts.append(np.array(n)[own])
        accept(batch, n, n_drafts)

    planner.accept = spy
    engine.step.pace.drafts = lambda rows, accepted, batch: kinds()
    return counts


def test_a_request_without_drafts_leaves_the_keys_of_others_as_they_are():
    """Its rows would be cached in the first block: it has no slots for drafts."""
    model, first = model_of("gpt2"), random_prompts([30], seed=6)[0]
    engine = draft_engine(model, model, 7, prefix_cache=True)
    counts, worker = accepting(engine), engine.step.worker
    run(engine, [first], wishes(["greedy"], 4))
    late = SamplingParams(max_tokens=40, min_tokens=40, ignore_eos=True)
    propose, wanted = worker.drafting.propose, []

    def noted(**given):
        if (given["state"].positions >= 0).sum() == 2:
            wanted.append(sorted(given["texts"].wants_drafts[:2].tolist()))
        propose(**given)

    worker.drafting = worker.drafting._replace(propose=noted)
    run(engine, random_prompts([7, 7], seed=7), [late, *wishes(["greedy"])])
    assert wanted and all(one == [0, 1] for one in wanted)
    counts.clear()
    run(engine, [first], wishes(["greedy"], 40))
    assert counts and all((n == 8).all() for n in counts)


@pytest.mark.parametrize("n_plain", [1, 2])
def test_a_chat_goes_on_with_all_drafts_accepted_after_turns_of_plain_steps(n_plain):
    model, text = model_of("gpt2"), random_prompts([20], seed=8)[0]
    engine, drafts = draft_engine(model, model, 3, prefix_cache=True), []
    counts = accepting(engine, lambda: drafts[-1])
    for kind in [False] * n_plain + [True]:
        drafts.append(kind)
        text = text + run(engine, [text], wishes(["greedy"], 20))[1][0].token_ids + [5, 6]
    assert counts and all((n == 4).all() for n in counts)


def test_requests_that_ended_long_ago_are_not_caught_up_with():
    model, drafts = model_of("gpt2"), []
    engine = draft_engine(model, model, 3)
    accepting(engine, lambda: drafts[-1])
    calls, call = [], engine.step._call
    engine.step._call = lambda name, *given: calls.append(name) or call(name, *given)
    for kind in (False, False, True):
        drafts.append(kind)
        run(engine, random_prompts([9, 4], seed=1), wishes(["greedy", "drawn"], 90))
    assert "decode" in calls and "catch_up" not in calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_draft_model_drafts_for_filtered_and_penalised_requests_in_every_dtype(dtype):
    model = model_of("qwen3").to(dtype)
    params = wishes(["filtered", "penalised"])
    _, outputs = run(drafting(draft_engine(model, model)), random_prompts([5, 9], seed=1), params)
    assert [len(one.token_ids) for one in outputs] == [N_TOKENS, N_TOKENS + 1]


def test_a_warm_up_among_requests_leaves_their_drafts_right():
    model = model_of("gpt2")
    engine, kinds = draft_engine(model, model, 3), cycle([True, False])
    counts, worker = accepting(engine, lambda: next(kinds)), engine.step.worker
    sizes = len(worker.state.rows), worker.state.table.shape[1], worker.device, (), len(worker.state.planes)
    worker._idle = DeviceState(*sizes)  # as on a GPU
    sequence = engine.make_sequence(random_prompts([9], seed=1)[0], wishes(["greedy"], 60)[0])
    engine.prefill([sequence])
    engine.decode([sequence])
    with torch.inference_mode():
        worker._run_idle(1)
    while not sequence.is_finished:
        engine.decode([sequence])
    assert all((n == 4).all() for n in counts)


class Clocked:
    """A row of a real planner that a real step decides about, with made-up times and acceptance.

    times: seconds of a plain step and of one that drafts. late: steps in flight, for whose work later steps
    take longer, too.
    """

    def __init__(self, times: tuple[float, float], late: int) -> None:
        self.step = SpeculativeStep.__new__(SpeculativeStep)
        self.step.pace, self.times, self.late = Pace(), times, late
        self.step._able = None, 0, None
        self.step.worker = SimpleNamespace(drafts_for=lambda rows: 7)
        self.planner = self.step.planner = Planner(1, 1, np.zeros((64, 1)), None, lambda *given: None, 7)
        self.planner.n_drafts[:], self.planner.left[:] = 7, 1 << 40
        self.begun, self.waiting, self.now = [], [times[0]] * late, 0.0

    def speed(self, accepted: Callable[[int], int], n_tokens: int) -> float:
        """Tokens per second of a request, as a multiple of that of plain steps.

        accepted: maps the number of its tokens to the drafts that its next step accepts, if it drafts.
        """
        batch, tokens, seconds = Batch([], [], np.zeros(1, np.int64), slice(1)), 0.0, 0.0
        self.planner.accepted[:], self.planner._running = np.nan, batch
        while tokens < n_tokens:
            n_drafts = self.step._n_drafts(1, batch)
            self.planner.begin_step(batch, n_drafts)
            own = self.times[n_drafts > 0]
            gained = accepted(int(tokens)) if n_drafts else 0
            tokens, seconds = tokens + 1 + gained, seconds + own
            self.begun.append((n_drafts, gained))
            self.waiting.append(own)
            if len(self.begun) > self.late:
                drafted, got = self.begun.pop(0)
                if drafted:
                    self.planner.accept(batch, [1 + got], drafted)
                    self.step.pace.reconsider()
                self.now += self.waiting.pop(0)
                self.step.pace.note(1, drafted > 0, self.now)
        return tokens / seconds * self.times[0]


@pytest.mark.parametrize("late", [0, RUN_AHEAD])
@pytest.mark.parametrize(("longer", "every"), [(1.02, 0), (1.5, 0), (2.0, 3), (8.0, 2)])
def test_a_row_that_gains_nothing_loses_at_most_three_per_cent(longer, every, late):
    """A draft is accepted in every n-th step, or none; the times are known from a first request."""
    clocked = Clocked((1e-3, longer * 1e-3), late)
    clocked.speed(lambda token: 0, 200)
    for _ in range(5):
        assert 0.97 < clocked.speed(lambda token: int(every > 0 and token % every == 0), 256) <= 1.0


@pytest.mark.parametrize(("longer", "accepted", "pays"), [(1.05, 0.4, True), (2.5, 1.0, False)])
def test_steps_are_measured_although_prompts_keep_coming(longer, accepted, pays):
    """The times are measured again after ``LASTING`` steps."""
    pace, batch, now, n_drafting = Pace(), Batch([], [], np.zeros(1, np.int64), slice(1)), 0.0, 0
    for i in range(4 * LASTING):
        if i % 3 == 0:
            pace.pause()
            now += 1.0
        drafts = not pace.rests(batch) and pace.drafts(8, accepted, batch)
        if drafts:
            pace.reconsider()
        now += longer if drafts else 1.0
        pace.note(8, drafts, now)
        n_drafting += drafts
    assert pace.longer(8) == pytest.approx(longer)
    assert (n_drafting > 0.98 * 4 * LASTING) if pays else (n_drafting < 0.02 * 4 * LASTING)


@pytest.mark.parametrize("late", [0, RUN_AHEAD])
@pytest.mark.parametrize(("longer", "accepted"), [(1.1, 1), (1.5, 3), (3.0, 6)])
def test_a_row_that_gains_drafts_nearly_always(longer, accepted, late):
    best = (1 + accepted) / longer
    assert 0.95 * best < Clocked((1e-3, longer * 1e-3), late).speed(lambda token: accepted, 6000) <= best


@pytest.mark.parametrize("late", [0, RUN_AHEAD])
def test_a_text_that_begins_to_repeat_is_noticed(late):
    clocked = Clocked((1e-3, 1.5e-3), late)
    clocked.speed(lambda token: 0, 200)
    late_at_most = 1.1 * LONGEST_REST
    best = 100 + late_at_most + (300 - late_at_most) / 7 * 1.5
    assert clocked.speed(lambda token: 6 * (token > 100), 400) > 400 / best


def test_the_more_rows_the_fewer_drafts_each_and_the_tokens_stay_the_same():
    """As rows end, the batch takes a smaller captured size, and each row gets more drafts."""
    model, options = model_of("gpt2"), {"max_batch_size": 192, "num_kv_blocks": 1200}
    engine = small_engine(model, recipe="speculative", speculative_tokens=11, **options)
    given = {rows: engine.step.worker.drafts_for(rows) for rows in (1, 16, 32, 64, 128, 192)}
    assert given == {1: 11, 16: 11, 32: 7, 64: 3, 128: 1, 192: 0}
    assert all(rows * (k + 1) <= MOST_VERIFIED for rows, k in given.items())
    prompts = random_prompts([3] * 150, seed=1)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4 + n // 5, ignore_eos=True) for n in range(len(prompts))
    ]
    _, plain = run(small_engine(model, **options), prompts, params)
    expected = [one.token_ids for one in plain]
    known = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    _, outputs = run(drafting(engine, Oracle(known, 0.7)), prompts, params)
    assert [one.token_ids for one in outputs] == expected
