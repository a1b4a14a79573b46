"""The lattice of settings: every value, and every two values, give the tokens of the request alone."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from rosellm.ladder.museum import MUSEUM, STEPS
from rosellm.ladder.rungs import CudaGraph
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.steps.resident import ResidentStep
from tests.helpers import ON_GPU, small_engine, uncached_greedy
from tests.roseinfer.lattice import (
    BUDGET,
    DETERMINISTIC_RUNGS,
    LEAST_LEAD,
    LONGEST_OUTPUT,
    MODELS,
    MODERN_MODELS,
    TOGETHER,
    Combination,
    Served,
    Witness,
    Workload,
    alone,
    axes_on,
    covering_array,
    parts,
    serve,
    values_of,
)

CASES = [pytest.param(c, "cpu", id=f"{c}-cpu") for c in covering_array("cpu", 1)]
CASES += [pytest.param(c, "cuda", id=f"{c}-gpu", marks=pytest.mark.gpu) for c in covering_array("cuda", 1)]


@pytest.mark.parametrize(("combination", "device"), CASES)
def test_every_value_of_every_axis_gives_the_tokens_of_the_request_alone(combination, device):
    check(combination, device)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_every_two_values_give_the_tokens_of_the_request_alone(device):
    for combination in covering_array(device, 2):
        try:
            check(combination, device)
        except Exception as error:
            raise AssertionError(str(combination)) from error


def check(combination: Combination, device: str) -> None:
    """Serves the combination's requests together: tokens, batches, prefills, text and blocks are right."""
    work = Workload.of(combination)
    engine = engine_for(combination, device, work)
    witness = Witness(engine)
    served = serve(engine, config_for(combination), work, combination.stream)
    assert [output.token_ids for output in served.outputs] == work.expected(combination.model)
    assert {output.finish_reason for output in served.outputs} == {"length"}
    assert_recipe(engine, combination)
    assert_batches(witness, combination, work)
    assert_pressure(engine, witness, served, combination, work)
    assert_text(engine, served, combination.stream)
    engine.check_integrity()
    if engine.prefix_cache is not None:
        engine.prefix_cache.clear()
        engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


def engine_for(combination: Combination, device: str, work: Workload) -> Engine:
    model, tokenizer = parts(combination.model, device)
    return small_engine(
        model,
        tokenizer=tokenizer,
        recipe=combination.recipe(deterministic=False),
        deterministic=combination.deterministic,
        max_batch_size=work.composition.places,
        num_kv_blocks=work.num_kv_blocks(combination),
        block_size=work.composition.block_size,
        prefix_cache=combination.prefix_cache,
    )


def config_for(combination: Combination) -> SchedulerConfig:
    limits = {"budget": {"prefill_token_budget": BUDGET}, "several": {"prefill_max_batch_size": TOGETHER}}
    return SchedulerConfig(
        admission_policy=combination.policy, fifo_every=3, **limits.get(combination.prefill, {})
    )


def assert_recipe(engine: Engine, combination: Combination) -> None:
    """The recipe is the combination's, and a graph was really captured, or its buffers made, where wanted."""
    assert engine.recipe == combination.recipe(combination.deterministic)
    assert engine.deterministic == combination.deterministic
    is_graph, on_gpu = combination.runner == "graph", engine.device.type == "cuda"
    if isinstance(engine.step, ResidentStep):
        assert (engine.step.worker.graphs is not None) == (is_graph and on_gpu)
        assert engine.step.worker._steps
    else:
        assert isinstance(engine.step, CudaGraph) == is_graph
        assert not is_graph or engine.step.captured


def assert_batches(witness: Witness, combination: Combination, work: Workload) -> None:
    """Prompts were cut, or started as many at a time as they should, and in the order of the policy; all
    places were taken at once, where nothing keeps requests apart."""
    order, prefills = list(witness.first_seen), witness.prefills
    if combination.policy == "fifo" or combination.composition in ("mixed", "crowded"):
        assert (order == sorted(order)) == (combination.policy == "fifo")
    is_cut, places = combination.prefill == "budget", work.composition.places
    assert min(2, places) <= max(witness.rows) <= places
    assert (witness.n_cut > 0) == is_cut
    if is_cut:
        assert max(map(sum, prefills)) <= (64 if combination.deterministic else BUDGET)
        return
    at_once = min(TOGETHER, places) if combination.prefill == "several" else places
    assert max(map(len, prefills)) <= at_once
    if not combination.forced:
        assert max(witness.rows) == places and max(map(len, prefills)) == at_once
        assert sum(map(len, prefills)) == 1 + len(work.prompts)


def assert_pressure(
    engine: Engine, witness: Witness, served: Served, combination: Combination, work: Workload
) -> None:
    """Requests were preempted if forced and else not; every prompt found the prefix that it shares."""
    assert (served.preemptions > 0) == combination.forced
    cache = engine.prefix_cache
    if cache is None:
        assert not combination.prefix_cache and witness.n_clones == 0
        return
    n_found = 1 if combination.forced else len(work.prompts)
    aligned = work.composition.prefix // engine.prefill_alignment * engine.prefill_alignment
    assert cache.hits >= n_found and cache.hit_tokens >= n_found * aligned
    assert combination.deterministic or witness.n_clones > 0


def assert_text(engine: Engine, served: Served, interval: int) -> None:
    """The text of the tokens, streamed in pieces of ``interval`` of them, or several joined if read late."""
    assert [o.text for o in served.outputs] == [engine.tokenizer.decode(o.token_ids) for o in served.outputs]
    for output, pieces in zip(served.outputs, served.pieces, strict=bool(interval)):
        assert "".join(pieces) == output.text
        assert len(pieces) <= -(-len(output.token_ids) // interval)
        assert len(output.metrics.token_times) == len(output.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_two_values_occur_together_but_those_that_cannot(device):
    """Rungs with a runner of their own or without a prefix cache, modes that need certain kernels, one kernel
    of whole layers, the preemption of the only request."""
    axes = axes_on(device)
    every = {
        frozenset(pair)
        for one, other in combinations(axes, 2)
        for pair in product([(one, value) for value in axes[one]], [(other, value) for value in axes[other]])
    }
    names = [*axes]
    found = {
        frozenset((names[axis], value) for axis, value in pair)
        for combination in covering_array(device, 2)
        for pair in values_of(combination, 2)
    }
    runner_of = {rung: MUSEUM[rung].as_dict()["runner"] for rung in axes["rung"] if rung in MUSEUM}
    other_runner = {"eager": "graph", "graph": "eager"}
    fast_only = [rung for rung in axes["rung"] if rung not in DETERMINISTIC_RUNGS]
    impossible = [{("rung", rung), ("runner", other_runner[runner])} for rung, runner in runner_of.items()]
    impossible += [{("rung", rung), ("prefix_cache", True)} for rung in axes["rung"] if rung in STEPS]
    impossible += [{("rung", rung), ("deterministic", True)} for rung in fast_only]
    impossible += [{("rung", "persistent_kernel"), ("model", name)} for name in MODERN_MODELS]
    impossible += [{("composition", "alone"), ("forced", True)}]
    assert every - found == {frozenset(pair) for pair in impossible}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_expected_tokens_are_varied_nowhere_nearly_tied_and_those_of_an_uncached_model(model):
    served = [c for n in (1, 2) for c in covering_array("cpu", n) if c.model == model]
    works = {(c.composition, c.forced, c.deterministic): Workload.of(c) for c in served}
    prompts = {tuple(prompt) for work in works.values() for prompt in [work.primer, *work.prompts]}
    outputs, leads = zip(*(alone(model, prompt) for prompt in prompts), strict=True)
    assert min(leads) > LEAST_LEAD and len({token for tokens in outputs for token in tokens}) > 15
    for prompt in sorted(prompts, key=len)[:2]:
        expected = uncached_greedy(parts(model, "cpu")[0], list(prompt), LONGEST_OUTPUT)
        assert alone(model, prompt)[0] == expected
