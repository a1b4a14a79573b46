"""The GPU-resident step: rows come and go, tokens come late, and each sequence gets its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rosellm.errors import KVCacheExhausted, OptionError
from rosellm.roseinfer.cache.device_state import FIELDS, INERT, POSITION, ROUND, ROUNDS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from tests import helpers
from tests.helpers import greedy_sequences, random_model, random_prompts, small_config, small_engine
from tests.roseinfer.steps.fake_graphs import captured  # noqa: F401

PROMPTS = random_prompts([1, 2, 7, 8, 9, 17, 30, 5, 3, 12], seed=1)
N_TOKENS = 12
MODEL = random_model(0)
EXPECTED = [helpers.uncached_greedy(MODEL, prompt, N_TOKENS) for prompt in PROMPTS]
RESIDENT = ["resident_step", "packed_prefill", BEST_RUNG]
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7}


def started(engine: Engine, which: list[int], max_tokens: int | list[int] = N_TOKENS):
    sequences = greedy_sequences(engine, [PROMPTS[i] for i in which], max_tokens)
    engine.prefill(sequences)
    return sequences


@pytest.mark.parametrize("rung", RESIDENT)
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_sequences_do_at_random_they_get_their_own_tokens_however_late(rung, seed):
    """They come, are prefilled in chunks, pause, give up their blocks and start again, and leave."""
    draw = random.Random(seed)
    engine = small_engine(MODEL, recipe=rung, max_batch_size=6, max_model_len=56, prefix_cache=seed % 2 == 0)
    state = engine.step.worker.state
    assert state.rows.shape[1] > FIELDS + state.table.shape[1]  # rows are padded
    to_come = draw.sample(range(len(PROMPTS)), len(PROMPTS))
    there: dict[Sequence, int] = {}
    decoding: set[Sequence] = set()

    def some(sequences) -> list[Sequence]:
        """Of those that are not finished, in any order."""
        running = [s for s in there if s in sequences and not s.is_finished]
        return draw.sample(running, draw.randint(0, len(running)))

    for _ in range(60):
        if to_come and len(there) < 6 and draw.random() < 0.5:
            index = to_come.pop()
            (sequence,) = greedy_sequences(engine, [PROMPTS[index]], N_TOKENS)
            there[sequence] = index
        if beginning := some(there.keys() - decoding):
            counts = [draw.randint(1, 40) for _ in beginning]
            decoding.update(engine.begin_prefill(beginning, counts))
        for _ in range(draw.randint(0, 2)):
            if running := some(decoding):
                engine.begin_decode(running)
        list(engine.step.collect(draw.randint(0, 4)))
        for sequence in [s for s in there if s.is_finished or draw.random() < 0.06]:
            assert sequence.output == EXPECTED[there[sequence]][: sequence.n_output]
            engine.release(sequence)
            decoding.discard(sequence)
            if sequence.is_finished or draw.random() < 0.5:
                del there[sequence]
        engine.check_integrity()
    assert not to_come


@pytest.mark.parametrize("rung", RESIDENT[1:])
def test_more_steps_than_the_ring_holds_may_be_begun_without_collecting_any(rung):
    n = ROUNDS + 10
    engine = small_engine(random_model(0, small_config(n_positions=n + 10)), recipe=rung)
    (sequence,) = only = greedy_sequences(engine, [PROMPTS[0]], n)
    engine.begin_prefill(only)
    while engine.begin_decode(only):
        pass
    assert sum(len(done.sequences) for done in engine.step.collect()) == n
    assert sequence.output == helpers.uncached_greedy(engine.model, PROMPTS[0], n)


def test_an_exhausted_cache_is_told_before_the_step_and_nothing_is_lost():
    engine = small_engine(MODEL, recipe=BEST_RUNG, num_kv_blocks=6)
    long, short = started(engine, [6, 4], 8)  # 4 blocks and 2: none is left
    with pytest.raises(KVCacheExhausted):
        for _ in range(8):
            engine.decode([long, short])
    had = long.output, short.output
    assert had == (EXPECTED[6][: long.n_output], EXPECTED[4][: short.n_output])
    engine.release(short)
    helpers.decode_all(engine, [long])
    assert long.output == EXPECTED[6][:8]


def test_more_sequences_than_rows_are_refused():
    engine = small_engine(MODEL, recipe=BEST_RUNG, max_batch_size=2)
    started(engine, [0, 1])
    with pytest.raises(OptionError, match="2 that run together"):
        started(engine, [2])


def penalised(engine: Engine, prompts: list[list[int]], n: int) -> list[Sequence]:
    """Greedy but for the first, under penalties that leave no token as likely as it was."""
    wishes = [PENALTIES | {"temperature": float(i == 0), "top_k": 9} for i in range(len(prompts))]
    params = [SamplingParams(seed=3, max_tokens=n, ignore_eos=True, **wish) for wish in wishes]
    return [engine.make_sequence(*pair) for pair in zip(prompts, params, strict=True)]


def test_penalties_count_a_requests_own_tokens_as_rows_come_and_go():
    """Rows that leave, move, come back and are edited; the host counts afresh before every token."""
    outputs = []
    for rung in ("resident_step", BEST_RUNG):
        engine = small_engine(random_model(0), recipe=rung)
        sequences = penalised(engine, PROMPTS, N_TOKENS)
        engine.prefill(sequences)
        for _ in range(3):
            engine.decode(sequences)
        engine.release(sequences[0])
        engine.decode(sequences[3:])
        engine.decode(sequences[1:])
        sequences[2].tokens[-1] = 50
        late = penalised(engine, PROMPTS[:2], N_TOKENS)
        engine.prefill(late)
        helpers.decode_all(engine, sequences[1:] + late)
        outputs.append([s.output for s in sequences + late])
    assert outputs[0] == outputs[1]
    assert all(mine != plain for mine, plain in zip(outputs[0][3:], EXPECTED[3:], strict=False))


@pytest.mark.parametrize("rung", [BEST_RUNG, "speculative"])
def test_a_row_that_moves_continues_from_its_edited_token(rung):
    """Also if that equals the last token of the sequence whose row it moves to."""
    for seed in range(6):
        model, params = random_model(seed), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        engine = small_engine(model, recipe=rung)
        sequences = [engine.make_sequence([5 + i, 9, 3 * i + 1, 7], params) for i in range(5)]
        engine.prefill(sequences)
        engine.decode(sequences)
        engine.release(sequences[0])
        last = sequences[4]
        last.tokens[-1] = sequences[0].tokens[-1]
        edited = list(last.tokens)
        while not last.is_finished:
            engine.decode(sequences[1:])
        assert last.tokens[len(edited) :] == helpers.uncached_greedy(model, edited, 16 - len(edited))


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("rung", [BEST_RUNG, "speculative"])
def test_moved_rows_keep_all_but_their_rounds_and_other_rows_stay_as_they_are(rung, has_graphs, request):
    if has_graphs:
        request.getfixturevalue("captured")
    worker = small_engine(MODEL, recipe=rung, warm_up=False, max_batch_size=7).step.worker
    assert (worker.graphs is not None) == has_graphs
    state, draw = worker.state, torch.Generator().manual_seed(0)
    parts = [state.rows, *vars(worker.texts).values()] if rung == "speculative" else [state.rows]
    before = [torch.randint(1, 1000, part.shape, generator=draw, dtype=torch.int32) for part in parts]
    sources, targets = [6, 4], [1, 3]
    for _ in range(2):  # a second time, the graph exists
        for part, old in zip(parts, before, strict=True):
            part.copy_(old)
        worker.call("move_rows", np.array([sources, targets], np.int32))
        for part, old in zip(parts, before, strict=True):
            expected = old.clone()
            expected[targets] = old[sources]
            if part is state.rows:
                expected[targets, ROUND] = old[targets, ROUND]
                expected[sources, POSITION] = INERT
            assert torch.equal(part, expected)


@pytest.mark.parametrize("rung", ["dense", "one_table", *RESIDENT])
@pytest.mark.parametrize(("position", "n_before"), [(29, 0), (33, 4)])
def test_a_row_with_logits_that_are_not_finite_fails_alone_with_its_reason(rung, position, n_before):
    gpt = random_model(0)
    gpt.position_embedding.weight[position] = float("nan")  # reached by the one prompt of 30 tokens alone
    params = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
    outputs = OfflineScheduler(small_engine(gpt, recipe=rung)).run(PROMPTS, params)
    failed = outputs.pop(6)
    assert failed.finish_reason == "failed" and "not finite" in failed.error
    assert failed.token_ids == EXPECTED[6][:n_before]
    assert [output.token_ids for output in outputs] == EXPECTED[:6] + EXPECTED[7:]


@pytest.mark.gpu
def test_the_loop_never_waits_for_the_device_implicitly():
    """Only explicit waits for events; torch raises on any other synchronisation."""
    engine = small_engine(random_model(0).to("cuda"), recipe=BEST_RUNG)
    helpers.generate(engine, PROMPTS[:8], N_TOKENS)
    sequences = greedy_sequences(engine, PROMPTS[:8], N_TOKENS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.begin_prefill(sequences)
        while engine.begin_decode(sequences):
            for _ in engine.step.collect(engine.step.run_ahead):
                pass
        list(engine.step.collect())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [s.output for s in sequences] == EXPECTED[:8]
