"""The equality lattice: in any combination, a request gets the tokens that plain ``dense`` gives it alone.

Axes: model, rung, batch composition, admission policy, prefill chunk, prefix cache, preemption, streaming,
runner, deterministic mode. Every value occurs, and in the slow test every pair of values that can occur
together does, on a CPU and on a GPU (a covering array).
"""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from itertools import chain, combinations, islice

import pytest

from rosellm.errors import RecipeError
from rosellm.ladder.rungs import CudaGraph
from rosellm.models.model import Transformer
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import LADDER, RECIPES
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import (
    MODERN,
    ON_GPU,
    WINDOWED,
    random_model,
    random_prompts,
    small_config,
    small_engine,
    uncached_greedy,
)
from tests.roseinfer.serving.common import WORDS, Calls, assert_all_free, greedy

PROMPT_SEED = 63
BUDGET = 5  # prompt tokens an iteration, where prompts are cut
TOGETHER = 2  # prompts an iteration, where several start at a time
MORE_OUTPUT = 11  # tokens each, so that blocks run out
LONGEST_OUTPUT = 24
LEAST_LEAD = 2e-4  # of a greedy token's logit over the second best, lest rounding decide
MODELS = {  # seed, shape
    "plain": (12, {}),
    "grouped": (2, {"n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "d_model": 48, "tie_embeddings": False}),
    "odd": (1, {"n_heads": 3, "n_kv_heads": 1, "d_model": 27, "d_ff": 50}),
    "modern": (4, MODERN),  # RMSNorm, rotation, SwiGLU, norms of heads that are wider than their share
    "windowed": (1, WINDOWED),
}


@dataclass(frozen=True)
class Composition:
    """Requests that are there together. suffixes: prompt tokens of each after the prefix that all share.

    places: sequences that run together at most. outputs: tokens each gets, and ``MORE_OUTPUT`` if someone is
    to be preempted. tight: KV blocks a layer that are too few for them, without and with a prefix cache; None
    where no request can be preempted. prefix: tokens.
    """

    places: int
    outputs: tuple[int, ...]
    suffixes: tuple[int, ...]
    tight: tuple[int | None, int | None]
    prefix: int = 10
    block_size: int = 8


# The request that lasts longest comes last and has the longest prompt, so that it has the highest row.
COMPOSITIONS = {
    "alone": Composition(1, (9,), (12,), (None, None)),
    "equal": Composition(4, (9,) * 4, (9,) * 4, (8, 8)),
    "mixed": Composition(5, (4, 6, 5, 8, 13), (11, 3, 7, 6, 17), (10, 9)),
    "crowded": Composition(3, (6, 4, 7, 5, 4, 6, 9), (13, 2, 9, 7, 5, 3, 14), (11, 9)),
}
# In deterministic mode prompts are cut, and prefixes shared, at multiples of 64 tokens. A prefix as long as
# that saves more blocks than the outputs take: no request is preempted where it is cached.
LONG_COMPOSITIONS = {
    "alone": Composition(1, (9,), (118,), (None, None), 66, 64),
    "equal": Composition(3, (7,) * 3, (118,) * 3, (7, None), 66, 64),
    "mixed": Composition(4, (4, 6, 5, 9), (120, 116, 122, 123), (7, None), 66, 64),
    "crowded": Composition(2, (6, 4, 7, 5), (120, 116, 121, 117), (7, None), 66, 64),
}


@dataclass(frozen=True)
class Combination:
    """One value an axis. stream: tokens between two pieces of text; 0: the offline scheduler, no stream."""

    model: str
    rung: str
    composition: str
    policy: str
    prefill: str
    prefix_cache: bool
    forced: bool
    stream: int
    runner: str
    deterministic: bool

    def is_allowed(self) -> bool:
        recipe = recipe_of(self.rung, self.model, self.runner, self.deterministic)
        if recipe is None or (self.prefix_cache and not recipe.has_prefix_cache):
            return False
        return not self.forced or self.shape().tight[self.prefix_cache] is not None

    def shape(self) -> Composition:
        return (LONG_COMPOSITIONS if self.deterministic else COMPOSITIONS)[self.composition]

    def takes_long(self) -> bool:
        return self.deterministic and self.composition != "alone"

    def __str__(self) -> str:
        return "-".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


@cache
def recipe_of(rung: str, model: str, runner: str, deterministic: bool) -> Rung | None:
    """None where the rung refuses the model, the runner or the mode."""
    recipe = replace(RECIPES[rung], runner=runner) if rung in RECIPES else LADDER[rung]
    if recipe.as_dict()["runner"] != runner:
        return None
    try:
        recipe.check_serves(small_config(**MODELS[model][1]))
        return recipe.invariant() if deterministic else recipe
    except RecipeError:
        return None


def axes_on(device: str) -> tuple[tuple, ...]:
    """The values of every field. Tuned launches need Triton, which would be interpreted on a CPU."""
    rungs = tuple(name for name in LADDER if device == "cuda" or LADDER[name].launch != "autotuned")
    both = (False, True)
    return (
        tuple(MODELS), rungs, tuple(COMPOSITIONS), ("fifo", "pack"),
        ("whole", "budget", "several"), both, both, (0, 1, 3), ("eager", "graph"), both,
    )  # fmt: skip


def values_of(combination: Combination, n: int) -> set[tuple]:
    """Every ``n`` of its values, each with its axis."""
    return set(combinations(enumerate(astuple(combination)), n))


@cache
def covering_array(device: str, n: int) -> list[Combination]:
    """Allowed combinations in which every ``n`` of the drawn ones' values occur: the best of 40 each time
    (AETG, Cohen et al. 1997)."""
    axes, rng = axes_on(device), random.Random(0)
    drawn = (Combination(*map(rng.choice, axes)) for _ in range(2_000 if n == 1 else 20_000))
    missing = {
        one: values_of(one, n) for one in drawn if one.is_allowed() and not (n == 1 and one.takes_long())
    }
    chosen = []
    while missing:
        best = max(islice(missing, 40), key=lambda combination: len(missing[combination]))
        found = missing[best]
        missing = {one: rest for one, values in missing.items() if (rest := values - found)}
        chosen.append(best)
    return chosen


# Models, what they generate alone, and requests.


@cache
def parts(name: str, device: str) -> tuple[Transformer, Tokenizer]:
    """A model in fp32 and its tokenizer."""
    seed, shape = MODELS[name]
    tokenizer = train_tokenizer([WORDS], 290)
    config = small_config(vocab_size=tokenizer.vocab_size, n_positions=256, **shape)
    return random_model(seed, config).to(device), tokenizer


@cache
def alone(name: str, prompt: tuple[int, ...]) -> tuple[list[int], float]:
    """What plain ``dense`` on a CPU makes of a request that is all there is; by how much its tokens led."""
    engine = Engine(parts(name, "cpu")[0], recipe="dense", max_batch_size=1)
    sequence = engine.make_sequence(list(prompt), greedy(LONGEST_OUTPUT))
    engine.prefill([sequence])
    leads = []
    while True:
        best, second = engine.step.last_logits()[0].topk(2).values.tolist()
        leads.append(best - second)
        if sequence.is_finished:
            return sequence.output, min(leads)
        engine.decode([sequence])


class Workload:
    """A request that is served first, so that its prefix may be cached, then those that come together."""

    def __init__(self, combination: Combination) -> None:
        self.shape = shape = combination.shape()
        vocab_size = parts(combination.model, "cpu")[0].config.vocab_size
        prefix, end, *suffixes = random_prompts([shape.prefix, 3, *shape.suffixes], PROMPT_SEED, vocab_size)
        self.prompts = [prefix + end, *(prefix + suffix for suffix in suffixes)]
        self.outputs = [1, *(n + MORE_OUTPUT * combination.forced for n in shape.outputs)]
        self.expected = [
            alone(combination.model, tuple(prompt))[0][:n]
            for prompt, n in zip(self.prompts, self.outputs, strict=True)
        ]
        lengths = [len(prompt) + n for prompt, n in zip(self.prompts, self.outputs, strict=True)]
        ample = sum(blocks_for(n, shape.block_size) for n in lengths) + 1
        self.num_kv_blocks = shape.tight[combination.prefix_cache] if combination.forced else ample


Served = tuple[list[RequestOutput], list[list[str]], int]


def serve(engine: Engine, config: SchedulerConfig, work: Workload, stream: int) -> Served:
    """The first alone, to its end, then all others at once: results, pieces of text, and preemptions."""
    params = [greedy(n) for n in work.outputs]
    if not stream:
        scheduler = OfflineScheduler(engine, config)
        outputs = scheduler.run(work.prompts[:1], params[0]) + scheduler.run(work.prompts[1:], params[1:])
        return outputs, [], scheduler.preemptions
    with StreamingManager(engine, config, stream_interval=stream) as manager:
        ids = manager.add_requests(work.prompts[:1], params[0])
        manager.result(ids[0], 60)
        ids += manager.add_requests(work.prompts[1:], params[1:])
        pieces = [list(manager.stream_text(i)) for i in ids]
        return [manager.result(i, 60) for i in ids], pieces, manager._scheduler.preemptions


# What must hold.


def check(combination: Combination, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves the combination's requests together: tokens, batches, prefills, text and blocks are right."""
    work = Workload(combination)
    model, tokenizer = parts(combination.model, device)
    engine = small_engine(
        model,
        tokenizer=tokenizer,
        recipe=recipe_of(combination.rung, combination.model, combination.runner, deterministic=False),
        deterministic=combination.deterministic,
        max_batch_size=work.shape.places,
        num_kv_blocks=work.num_kv_blocks,
        block_size=work.shape.block_size,
        prefix_cache=combination.prefix_cache,
    )
    calls = Calls(engine, monkeypatch)
    limits = {"budget": {"prefill_token_budget": BUDGET}, "several": {"prefill_max_batch_size": TOGETHER}}
    limited = limits.get(combination.prefill, {})
    config = SchedulerConfig(admission_policy=combination.policy, fifo_every=3, **limited)
    outputs, texts, preemptions = serve(engine, config, work, combination.stream)
    assert [output.token_ids for output in outputs] == work.expected
    assert (preemptions > 0) == combination.forced
    assert_runner(engine, combination)
    assert_batches(calls, combination, work.shape)
    if combination.prefix_cache:
        n_found = 1 if combination.forced else len(work.shape.outputs)
        aligned = work.shape.prefix // engine.prefill_alignment * engine.prefill_alignment
        assert engine.prefix_cache.hit_tokens >= n_found * aligned
    assert [o.text for o in outputs] == [tokenizer.decode(o.token_ids) for o in outputs]
    for output, pieces in zip(outputs, texts, strict=bool(combination.stream)):
        assert "".join(pieces) == output.text
        assert len(pieces) <= -(-len(output.token_ids) // combination.stream)
    assert_all_free(engine)


def assert_runner(engine: Engine, combination: Combination) -> None:
    """A graph was really captured, or its buffers made, where wanted."""
    is_graph, on_gpu = combination.runner == "graph", engine.device.type == "cuda"
    if isinstance(engine.step, ResidentStep):
        assert (engine.step.worker.graphs is not None) == (is_graph and on_gpu)
        assert engine.step.worker._steps
    else:
        assert isinstance(engine.step, CudaGraph) == is_graph
        assert not is_graph or engine.step.captured


def assert_batches(calls: Calls, combination: Combination, shape: Composition) -> None:
    """Prompts were cut, or started as many at a time as they should, and in the order of the policy; all
    places were taken at once, where nothing keeps requests apart."""
    prefills, rows = calls.of("prefill"), max(map(len, calls.of("decode")))
    order = list(dict.fromkeys(chain(*prefills)))
    if combination.policy == "fifo" or combination.composition in ("mixed", "crowded"):
        assert (order == sorted(order)) == (combination.policy == "fifo")
    drafts = combination.rung == "speculative"  # which may end a request before the next one starts
    assert (1 if drafts else min(2, shape.places)) <= rows <= shape.places
    if combination.prefill == "budget":
        assert max(map(sum, calls.chunks)) <= (64 if combination.deterministic else BUDGET)
        return
    at_once = min(TOGETHER, shape.places) if combination.prefill == "several" else shape.places
    assert max(map(len, prefills)) <= at_once
    if not combination.forced:
        assert (drafts or rows == shape.places) and max(map(len, prefills)) == at_once
        assert sum(map(len, prefills)) == 1 + len(shape.outputs)


CASES = [pytest.param(c, "cpu", id=f"{c}-cpu") for c in covering_array("cpu", 1)]
CASES += [pytest.param(c, "cuda", id=f"{c}-gpu", marks=pytest.mark.gpu) for c in covering_array("cuda", 1)]


@pytest.mark.parametrize(("combination", "device"), CASES)
def test_every_value_of_every_axis_gives_the_tokens_of_the_request_alone(combination, device, monkeypatch):
    check(combination, device, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_every_two_values_give_the_tokens_of_the_request_alone(device, monkeypatch):
    for combination in covering_array(device, 2):
        try:
            with monkeypatch.context() as patched:
                check(combination, device, patched)
        except Exception as error:
            raise AssertionError(str(combination)) from error


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_value_of_every_axis_occurs(device):
    columns = zip(*map(astuple, covering_array(device, 1)), strict=True)
    assert [set(column) for column in columns] == [set(values) for values in axes_on(device)]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_expected_tokens_are_varied_nowhere_nearly_tied_and_those_of_an_uncached_model(model):
    served = [c for n in (1, 2) for c in covering_array("cpu", n) if c.model == model]
    prompts = {tuple(prompt) for combination in served for prompt in Workload(combination).prompts}
    outputs, leads = zip(*(alone(model, prompt) for prompt in prompts), strict=True)
    assert min(leads) > LEAST_LEAD and len({token for tokens in outputs for token in tokens}) > 15
    for prompt in sorted(prompts, key=len)[:2]:
        expected = uncached_greedy(parts(model, "cpu")[0], list(prompt), LONGEST_OUTPUT)
        assert alone(model, prompt)[0] == expected
