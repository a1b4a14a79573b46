"""Prefills as they are captured, on the CPU: padded, from one buffer; tokens are the host's."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import tile_columns
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill, LayerSize, layer_size
from tests import helpers
from tests.helpers import MODERN, TRITON_DEVICES, random_model, random_prompts, small_config, small_engine
from tests.roseinfer.steps.fake_graphs import captured

__all__ = ["captured"]
WISHES = (
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 0.9, "top_k": 9},
    {"temperature": 1.1, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 3},
)
MODEL = random_model(0)
RUNGS = ["packed_prefill", BEST_RUNG]
GARBAGE = 0x7F7F7F7F
shared = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_requests(draw: random.Random, n: int, wishes=WISHES) -> list[tuple[list[int], SamplingParams]]:
    prompts = random_prompts([draw.randint(1, 40) for _ in range(n)], seed=draw.randrange(1000))
    sizes = [{"max_tokens": draw.randint(1, 5), "seed": draw.randrange(1000)} for _ in prompts]
    return [
        (p, SamplingParams(**size, **draw.choice(wishes))) for p, size in zip(prompts, sizes, strict=True)
    ]


def run_program(engine: Engine, requests, seed: int) -> list[list[int]]:
    """Prompts in random chunks, some together with others' last chunks, then all decoded together."""
    draw = random.Random(seed)
    sequences = [engine.make_sequence(*request) for request in requests]
    waiting = list(sequences)
    while waiting:
        some = draw.sample(waiting, draw.randint(1, len(waiting)))
        engine.begin_prefill(some, [draw.randint(1, s.n_prompt - s.num_cached_tokens) for s in some])
        waiting = [s for s in waiting if s.num_cached_tokens < s.n_prompt]
    list(engine.step.collect())
    outputs = helpers.decode_all(engine, sequences)
    for sequence in sequences:
        engine.release(sequence)
    engine.check_integrity()
    return outputs


def poison(engine: Engine) -> None:
    """What no run has sent yet must not matter."""
    prompts = engine.step.worker.prompts
    prompts.buffer.words.fill_(GARBAGE)
    prompts._hidden.fill_(float("nan"))
    prompts.packed.state.rows[-1, 1:] = -1  # the spare row


@pytest.fixture
def room(monkeypatch) -> int:
    """Of a GPU: engines take the keys of prefixes of 20 tokens and more in pieces."""
    monkeypatch.setattr("rosellm.roseinfer.assembly.room_of", lambda model, most_positions: 16)
    monkeypatch.setattr("rosellm.roseinfer.kernels.prefill_tiles.LONG_PREFIX", 20)
    monkeypatch.setattr("rosellm.roseinfer.kernels.prefill_tiles.PIECE_KEYS", 0.1)
    return 16


@pytest.fixture
def replayed(monkeypatch) -> list[LayerSize]:
    """Sizes of the layers' runs."""
    runs, run_layers = [], CapturedPrefill._run_layers

    def noted(self, *size, **n_layers):
        runs.append(size)
        return run_layers(self, *size, **n_layers)

    monkeypatch.setattr(CapturedPrefill, "_run_layers", noted)
    return runs


@pytest.mark.parametrize(
    ("rung", "is_cut"),
    [
        *((rung, False) for rung in RUNGS),
        pytest.param("persistent_kernel", False, marks=pytest.mark.slow),
        pytest.param(BEST_RUNG, True, marks=pytest.mark.slow),
    ],
)
@shared
@given(st.integers(0, 10**9))
def test_tokens_are_those_of_a_padded_prefill_and_no_request_waits_for_a_capture(
    captured, request, rung, is_cut, seed
):
    """Whatever the buffers held."""
    if is_cut:
        request.getfixturevalue("room")
    draw = random.Random(seed)
    requests = random_requests(draw, 6)
    sizes = draw.choice([{}, {"max_batch_size": 6}, {"max_batch_size": 20, "max_model_len": 50}])
    padded, engine = (small_engine(MODEL, recipe=one, **sizes) for one in ("resident_step", rung))
    assert isinstance(engine.step.worker.prompts, CapturedPrefill)
    assert padded.step.captures() == engine.step.captures() == []
    poison(engine)
    assert run_program(engine, requests, seed) == run_program(padded, requests, seed)
    assert padded.late_captures == engine.late_captures == 0 < engine.step.n_captured


@pytest.mark.parametrize("rung", RUNGS)
def test_a_prefill_captured_at_first_use_writes_nothing_of_the_one_before_it(captured, rung):
    """Warming up must not repeat the latest prefill: its blocks may be another sequence's by then."""
    engine = small_engine(MODEL, recipe=rung, warm_up=False)
    assert engine.step.n_captured == 0
    helpers.generate(engine, random_prompts([9, 3], seed=2), 1)
    engine.blocks.k_cache.fill_(float("nan"))
    engine.prefill(helpers.greedy_sequences(engine, random_prompts([30], seed=3), 6))  # another bucket
    written = ~engine.blocks.k_cache[0].isnan().any(dim=-1).any(dim=1)  # [N_BLOCKS, BLOCK_SIZE]
    assert written.sum() == 30
    assert engine.late_captures == engine.step.n_captured > 0
    engine.warm_up()
    assert engine.late_captures == 0


@pytest.mark.parametrize(("lengths", "most"), [([50] * 3, 128), ([2] * 5, 4096)])
def test_more_tokens_or_sequences_than_are_captured_run_uncaptured(captured, monkeypatch, lengths, most):
    monkeypatch.setattr("rosellm.roseinfer.steps.captured_prefill.CAPTURED_TOKENS", most)
    monkeypatch.setattr("rosellm.roseinfer.steps.captured_prefill.PLACES", (1, 4))
    engine = small_engine(MODEL, recipe=BEST_RUNG)
    prompts = random_prompts(lengths)
    sequences = helpers.greedy_sequences(engine, prompts, 4)
    engine.step.worker.prompts._layer_runs.clear()  # a replay would capture again
    engine.prefill(sequences)
    assert engine.late_captures == 0
    assert helpers.decode_all(engine, sequences) == [
        helpers.uncached_greedy(MODEL, prompt, 4) for prompt in prompts
    ]


@pytest.fixture
def large(captured) -> CapturedPrefill:
    """Of an engine of 256 rows; nothing is captured."""
    model = random_model(0, small_config(n_positions=4096))
    return small_engine(model, recipe=BEST_RUNG, max_batch_size=256, warm_up=False).step.worker.prompts


@settings(shared, max_examples=40)
@given(st.integers(0, 10**9))
def test_a_run_that_is_captured_has_a_program_for_each_tile(large, seed):
    chance = random.Random(seed)
    most = chance.choice([1, 3, 40, 64, 65, 300])
    counts = [chance.randint(1, most) for _ in range(chance.choice([1, 2, 15, 16, 17, 30, 256]))]
    while sum(counts) > large.most_tokens:
        counts.pop()
    size = layer_size(sum(counts), len(counts), in_pieces=False)
    assert size in large._layer_sizes()
    n_tiles = tile_columns([0] * len(counts), counts, None, BLOCK_M).shape[1]
    assert n_tiles <= large.buffer.layer_inputs(*size).columns.shape[1] <= size[0]


PADDED = [[(0, 3), (1, 4), (2, 2)], [(1, 1)]]  # chunks of prompts: (whose, how many tokens)
IN_PIECES = [[(0, 40), (2, 25)], [(0, 10), (1, 3), (2, 5)]]
GPT2, QWEN3 = small_config(n_layers=1), small_config(n_layers=1, **MODERN)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("config", "chunks", "most"),
    [
        pytest.param(GPT2, PADDED, 16, marks=pytest.mark.slow, id="gpt2, padded"),
        pytest.param(QWEN3, PADDED, 16, id="qwen3, padded"),
        pytest.param(QWEN3, IN_PIECES, 64, marks=pytest.mark.slow, id="qwen3, in pieces"),
    ],
)
def test_the_kernels_give_the_same_tokens(captured, request, replayed, device, config, chunks, most):
    if chunks is IN_PIECES:
        request.getfixturevalue("room")
    lengths = [sum(n for chunk in chunks for whose, n in chunk if whose == i) for i in range(3)]
    model, prompts = random_model(0, config), random_prompts(lengths)
    expected = [helpers.uncached_greedy(model, prompt, 2) for prompt in prompts]
    options = {"recipe": BEST_RUNG, "kernels": "triton", "max_batch_size": 4, "max_model_len": most}
    engine = small_engine(model.to(device), warm_up=device == "cuda", **options)
    sequences = helpers.greedy_sequences(engine, prompts, 2)
    for chunk in chunks:
        replayed.clear()
        engine.begin_prefill([sequences[i] for i, _ in chunk], [n for _, n in chunk])
    list(engine.step.collect())
    assert ((BLOCK_M, "pieces") in replayed) == (chunks is IN_PIECES) or device == "cuda"
    assert helpers.decode_all(engine, sequences) == expected
    assert engine.late_captures == 0 or device == "cpu"


def test_in_deterministic_mode_no_keys_are_cut(captured, room, replayed):
    config = small_config(n_positions=256, n_layers=1)
    engine = small_engine(random_model(0, config), deterministic=True, warm_up=False)
    (sequence,) = helpers.greedy_sequences(engine, random_prompts([150]), 2)
    engine.begin_prefill([sequence], [128])
    engine.begin_prefill([sequence])
    assert replayed and not any(tiling == "pieces" for _, tiling in replayed)
    assert not any(tiling == "pieces" for _, tiling in engine.step.worker.prompts._layer_sizes())


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 128, 500])
def test_on_a_gpu_a_long_prompt_in_chunks_gives_the_tokens_of_the_whole(chunk):
    model = random_model(0, small_config(n_positions=4096, **MODERN)).to("cuda")
    prompts = random_prompts([3000, 2050])
    options = {"recipe": BEST_RUNG, "max_batch_size": 2, "block_size": 64}
    expected = helpers.generate(small_engine(model, **options), prompts, 8)
    engine = small_engine(model, **options)
    sequences = helpers.greedy_sequences(engine, prompts, 8)
    for sequence in sequences:
        while sequence.n_to_prefill > chunk:
            engine.begin_prefill([sequence], [chunk])
    engine.prefill(sequences)
    assert helpers.decode_all(engine, sequences) == expected
    assert engine.late_captures == 0 and (BLOCK_M, "pieces") in engine.step.worker.prompts._layer_runs


@pytest.mark.parametrize("heads", [(12, 12), (16, 8)])
def test_the_graphs_of_a_large_engine_are_few_and_have_every_variant_of_attention(captured, heads):
    """A capture takes 10 to 40 ms."""
    n_heads, n_kv_heads = heads
    config = small_config(n_positions=1024, n_heads=n_heads, n_kv_heads=n_kv_heads, d_model=16 * n_heads)
    sizes = {"max_batch_size": 256, "num_kv_blocks": 4, "block_size": 64}
    engine = small_engine(random_model(0, config), recipe=BEST_RUNG, kernels="triton", warm_up=False, **sizes)
    bind, step = engine.step.worker.bind, engine.step.worker
    bind.num_sms = 132
    keys = {capture.args for capture in step.captures() if capture.func == step.step}
    assert len(step.captures()) <= 150
    for bucket, longest in product({bucket for bucket, _, _ in keys}, {*range(1, 1025, 23), 1024}):
        variants = {bind.variant(bucket, longest, share * longest) for share in (0.1, 0.6, 0.9, 1)}
        modes = step.next_tokens.chooser.modes(bucket)
        assert {(bucket, *one) for one in product(modes, variants)} <= keys
