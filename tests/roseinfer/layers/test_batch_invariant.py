"""Deterministic mode: bitwise the same logits in any batch, however prompts are cut, cached, preempted."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels import norm
from rosellm.roseinfer.kernels.table import TRITON
from rosellm.roseinfer.layers.batch_invariant import invariant_kernels
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import DTYPES, FAMILIES, bits, greedy_sequences, random_model, random_prompts, small_config

CONFIG = small_config(n_positions=256)
STEPS = 6
PROBE = random_prompts([70], seed=9)[0]
COMPANY = random_prompts([1, 3, 64, 65, 130, 9, 17, 40, 5, 2, 100, 33, 8, 8, 8, 21, 77, 6], seed=4)
PLACES = [("cpu", "torch")] + [pytest.param(("cuda", "triton"), marks=pytest.mark.gpu, id="gpu")]


def engine_of(model: Transformer, **options) -> Engine:
    options = {"recipe": BEST_RUNG, "max_batch_size": 256, "num_kv_blocks": 600, "block_size": 16} | options
    return Engine(model, **({"deterministic": True} | options))


def test_the_norms_of_any_number_of_rows_have_as_many_warps(monkeypatch):
    """The order of their sums depends on it."""
    launched = []
    spy = defaultdict(lambda: lambda *_arguments, **options: launched.append(options["num_warps"]))
    monkeypatch.setattr(norm, "_add_norm_kernel", spy)
    for rows in (1, 2, 16, 17, 1025):
        x = torch.zeros(rows, 1024)
        invariant_kernels(TRITON, dependent=False).add_norm(x=x, scale=x[0], shift=None, eps=1e-5)
    assert len(launched) == 5 and len(set(launched)) == 1


def logits_of_probe(engine: Engine, n_others: int, place: int = 0) -> Tensor:
    """Logits ``[STEPS, V]`` of the probe's tokens, ``n_others`` other requests in its batch."""
    prompts = [COMPANY[i % len(COMPANY)] for i in range(n_others)]
    prompts.insert(place, PROBE)
    sequences = greedy_sequences(engine, prompts, STEPS)
    logits = []
    engine.prefill(sequences)
    logits.append(engine.step.last_logits()[place].clone())
    for _ in range(STEPS - 1):
        engine.decode(sequences)
        logits.append(engine.step.last_logits()[place].clone())
    for sequence in sequences:
        engine.release(sequence)
    return torch.stack(logits)


REAL = {"d_model": 768, "n_heads": 12, "head_dim": 64, "d_ff": 3072, "vocab_size": 5003}
ON_CPU = [("cpu", torch.float32, n) for n in (1, 2, 7, 15, 16, 40)]
ON_GPUS = [("cuda", dtype, n) for dtype in DTYPES for n in (1, 7, 8, 31, 63, 64, 127, 128, 255)]
BITWISE = [pytest.param(*one, marks=pytest.mark.slow) for one in ON_CPU]
BITWISE += [pytest.param(*one, marks=pytest.mark.gpu) for one in ON_GPUS]


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize(("device", "dtype", "n_others"), BITWISE)
def test_logits_are_bitwise_those_of_the_request_alone(device, dtype, n_others, family):
    width = REAL if device == "cuda" else {}
    config = small_config(**FAMILIES.get(family, {}) | width | {"n_positions": 256})
    model = random_model(0, config, std=0.05 if width else 0.3).to(device, dtype)
    engine = engine_of(model, num_kv_blocks=8192 if width else 600)
    alone = logits_of_probe(engine, 0)
    for place in (0, n_others):
        assert torch.equal(bits(logits_of_probe(engine, n_others, place)), bits(alone))


def heard_logits(engine: Engine, config: SchedulerConfig, prompts: list[list[int]], n: int):
    """Every request's tokens and, for each, the bits of the logits that it was chosen from."""
    seen: dict[int, dict[int, bytes]] = {}
    scheduler = OnlineScheduler(engine, config)
    params = [SamplingParams(temperature=t, seed=5, max_tokens=n) for t in (0.0, 1.0)]
    ids = scheduler.add_requests(prompts, [params[i % 2] for i in range(len(prompts))])
    begin_prefill, begin_decode = engine.begin_prefill, engine.begin_decode
    engine.step.run_ahead = 0  # so that it is known which token a step's logits are for

    def keep(sequences, ahead):
        for row, sequence in enumerate(sequences):
            found = bits(engine.step.last_logits()[row].contiguous()).cpu().numpy().tobytes()
            mine = seen.setdefault(sequence.request_id, {})
            assert mine.setdefault(sequence.num_cached_tokens + ahead, found) == found

    def prefill_and_keep(sequences, counts):
        whole = begin_prefill(sequences, counts)
        keep(whole, 0)
        return whole

    def decode_and_keep(sequences):
        n_rows = begin_decode(sequences)
        keep(sequences, 1)
        return n_rows

    engine.begin_prefill, engine.begin_decode = prefill_and_keep, decode_and_keep
    while scheduler.has_unfinished:
        scheduler.step()
    outputs = [scheduler.take_result(i) for i in ids]
    engine.check_integrity()
    return [o.token_ids for o in outputs], [seen[i] for i in ids], scheduler.preemptions


SLOW = ("chunks of 64", "chunks of 192", "prefix cache", "preemption", "small batches")
CASES = ["all of them", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_chunks_cached_prefixes_and_preemption_change_no_bit(case, place):
    device, kernels = place
    dtype = torch.float32 if device == "cpu" else torch.float16
    model = random_model(0, CONFIG).to(device, dtype)
    prompts = [PROBE + prompt for prompt in COMPANY[:5]] + [PROBE + COMPANY[4]]
    options = {"kernels": kernels, "max_batch_size": 16}
    tokens, logits, _ = heard_logits(engine_of(model, **options), SchedulerConfig(), prompts, 12)
    budget = {"chunks of 64": 64, "chunks of 192": 192, "all of them": 192}.get(case, 16384)
    if case in ("preemption", "all of them"):
        options["num_kv_blocks"] = 19
    options["prefix_cache"] = case in ("prefix cache", "all of them")
    engine = engine_of(model, **options)
    batch = 2 if case == "small batches" else 16
    at_once = 2 if options["prefix_cache"] else 256
    config = SchedulerConfig(batch, prefill_max_batch_size=at_once, prefill_token_budget=budget)
    found = heard_logits(engine, config, prompts, 12)
    assert found[0] == tokens
    assert found[1] == logits
    assert found[2] > 0 or "num_kv_blocks" not in options
    assert engine.prefix_cache is None or engine.prefix_cache.hits > 0


@pytest.mark.parametrize("rung", [rung for rung in LADDER if LADDER[rung].as_dict()["gemm"] != "small_m"])
def test_rungs_whose_sums_have_no_one_order_refuse_the_mode(rung):
    with pytest.raises(RecipeError, match="(numerics='invariant'|deterministic=True) needs"):
        engine_of(random_model(0, CONFIG), recipe=rung)
