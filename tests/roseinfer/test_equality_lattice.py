"""The lattice of settings: every value, and every two values, give the tokens of the request alone."""

from __future__ import annotations

from itertools import accumulate

import pytest

from rosellm.ladder.rungs import CudaGraph
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.steps.resident import ResidentStep
from tests.helpers import small_engine, uncached_greedy
from tests.roseinfer.lattice import (
    BUDGET,
    DEVICES,
    LEAST_LEAD,
    LONGEST_OUTPUT,
    MODELS,
    ON_DEVICE,
    TOGETHER,
    Combination,
    Served,
    Witness,
    Workload,
    allowed_values,
    alone,
    covering_array,
    parts,
    pieces_of,
    serve,
    values_of,
    with_runner,
)

CASES = [pytest.param(c, "cpu", id=f"{c}-cpu") for c in covering_array("cpu", 1)]
CASES += [pytest.param(c, "cuda", id=f"{c}-gpu", marks=pytest.mark.gpu) for c in covering_array("cuda", 1)]


@pytest.mark.parametrize(("combination", "device"), CASES)
def test_every_value_of_every_axis_gives_the_tokens_of_the_request_alone(
    combination: Combination, device: str
):
    check(combination, device)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ON_DEVICE)
def test_every_two_values_give_the_tokens_of_the_request_alone(device: str):
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
    assert_runner(engine, combination)
    assert_batches(witness, combination, work)
    assert_prefills(witness, combination, work)
    assert_pressure(engine, witness, served, combination, work)
    assert_text(engine, served, combination)
    assert_idle(engine)


def engine_for(combination: Combination, device: str, work: Workload) -> Engine:
    model, tokenizer = parts(combination.model, device)
    return small_engine(
        model,
        tokenizer=tokenizer,
        recipe=with_runner(combination.rung, combination.runner),
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


def assert_runner(engine: Engine, combination: Combination) -> None:
    """The recipe is the combination's, and a graph was really captured, or its buffers made, where wanted."""
    assert engine.recipe == combination.recipe() and engine.deterministic == combination.deterministic
    is_graph, on_gpu = combination.runner == "graph", engine.device.type == "cuda"
    if isinstance(engine.step, ResidentStep):
        assert (engine.step.worker.graphs is not None) == (is_graph and on_gpu)
        assert engine.step.worker._steps
        return
    assert isinstance(engine.step, CudaGraph) == is_graph
    assert not is_graph or engine.step.captured


def assert_batches(witness: Witness, combination: Combination, work: Workload) -> None:
    """All places were taken at once, where nothing keeps requests apart; rows moved up as others left."""
    places = work.composition.places
    if combination.forced or combination.prefill == "budget":
        assert min(2, places) <= max(witness.rows) <= places
        return
    assert max(witness.rows) == places
    if combination.composition == "mixed" and LADDER[combination.rung].as_dict()["step"] == "resident":
        assert witness.n_moves > 0


def assert_prefills(witness: Witness, combination: Combination, work: Workload) -> None:
    """Prompts were cut, or started as many at a time as they should, and in the order of the policy."""
    order = list(witness.first_seen)
    if combination.policy == "fifo":
        assert order == sorted(order)
    elif combination.composition in ("mixed", "crowded"):
        assert order != sorted(order)
    n_prompts, most = 1 + len(work.prompts), max(map(len, witness.prefills))
    if combination.prefill == "budget":
        aligned = 64 if combination.deterministic else BUDGET
        assert max(map(sum, witness.prefills)) <= aligned
        assert witness.n_cut > 0 and sum(map(len, witness.prefills)) > n_prompts
        return
    assert witness.n_cut == 0
    at_once = work.composition.places
    if combination.prefill == "several":
        at_once = min(TOGETHER, at_once)
    assert most <= at_once
    if not combination.forced:
        assert most == at_once and sum(map(len, witness.prefills)) == n_prompts


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


def assert_text(engine: Engine, served: Served, combination: Combination) -> None:
    """The text of the tokens; in pieces at the stream's interval, several joined if they are read late."""
    tokenizer, interval = engine.tokenizer, combination.stream
    assert [o.text for o in served.outputs] == [tokenizer.decode(o.token_ids) for o in served.outputs]
    if not interval:
        return
    expected = [pieces_of(output.token_ids, tokenizer, interval) for output in served.outputs]
    assert ["".join(pieces) for pieces in served.pieces] == [output.text for output in served.outputs]
    for pieces, smallest in zip(served.pieces, expected, strict=True):
        assert set(accumulate(pieces)) <= set(accumulate(smallest))
    assert [len(o.metrics.token_times) for o in served.outputs] == [len(o.token_ids) for o in served.outputs]


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    if engine.prefix_cache is not None:
        engine.prefix_cache.clear()
        engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_values_that_can_occur_together_do(device: str, n: int):
    found = {values for combination in covering_array(device, n) for values in values_of(combination, n)}
    assert found == set(allowed_values(device, n))


def every_combination() -> list[Combination]:
    return [*covering_array("cpu", 1), *covering_array("cpu", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_what_is_expected_is_varied_nowhere_nearly_tied_and_what_an_uncached_model_gives(model: str):
    works = {
        (c.composition, c.forced, c.deterministic): Workload.of(c)
        for c in every_combination()
        if c.model == model
    }
    prompts = {tuple(prompt) for work in works.values() for prompt in [work.primer, *work.prompts]}
    assert min(alone(model, prompt)[1] for prompt in prompts) > LEAST_LEAD
    assert len({token for prompt in prompts for token in alone(model, prompt)[0]}) > 15
    for prompt in sorted(prompts, key=len)[:2]:
        assert alone(model, prompt)[0] == uncached_greedy(
            parts(model, "cpu")[0], list(prompt), LONGEST_OUTPUT
        )
