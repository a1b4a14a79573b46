"""The equality lattice: in any combination, a request gets the tokens that plain ``dense`` gives it alone.

Axes: model, rung, batch composition, admission policy, prefill chunk, prefix cache, preemption, streaming,
runner, deterministic mode. Every pair of values that can occur together does, on a CPU and on a GPU (a
covering array).
"""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from itertools import combinations, islice
from threading import Event

import torch

from rosellm.errors import RecipeError
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder as folder_of, load_config
from rosellm.models.loading import load_parts
from rosellm.models.model import Transformer
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import LADDER, RECIPES
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import MODERN, WINDOWED, random_model, random_prompts, small_config

WORDS = "hello world, here is some text to learn from, with words and words"
PROMPT_SEED = 63
BUDGET = 5  # prompt tokens an iteration, where prompts are cut
TOGETHER = 2  # prompts an iteration, where several start at a time
MORE_OUTPUT = 11  # tokens each, so that blocks run out
LONGEST_OUTPUT = 24
LEAST_LEAD = 2e-4  # of a greedy token's logit over the second best, lest rounding decide
SMALL_MODELS = {
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
    tight: tuple[int, int | None] | None
    prefix: int = 10
    block_size: int = 8


MODELS = (*SMALL_MODELS, *SHIPPED_MODELS)
MODERN_MODELS = ("modern", "windowed", "rose-tiny-qwen3")
DETERMINISTIC_RUNGS = ("small_gemm", "dependent_launch", "split_kv")

# The request that lasts longest comes last and has the longest prompt, so that it has the highest row.
COMPOSITIONS = {
    "alone": Composition(1, (9,), (12,), None),
    "equal": Composition(4, (9,) * 4, (9,) * 4, (8, 8)),
    "mixed": Composition(5, (4, 6, 5, 8, 13), (11, 3, 7, 6, 17), (10, 9)),
    "crowded": Composition(3, (6, 4, 7, 5, 4, 6, 9), (13, 2, 9, 7, 5, 3, 14), (11, 9)),
}
# In deterministic mode prompts are cut, and prefixes shared, at multiples of 64 tokens. A prefix as long as
# that saves more blocks than the outputs take: no request is preempted where it is cached.
LONG_COMPOSITIONS = {
    "alone": Composition(1, (9,), (118,), None, 66, 64),
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

    def recipe(self, deterministic: bool) -> Rung | None:
        """None where the rung refuses the model, the runner or the mode."""
        return recipe_of(self.rung, self.model, self.runner, deterministic)

    def is_allowed(self) -> bool:
        recipe, tight = self.recipe(self.deterministic), self.shape().tight
        if recipe is None or (self.prefix_cache and not recipe.has_prefix_cache):
            return False
        return not self.forced or (tight is not None and tight[self.prefix_cache] is not None)

    def shape(self) -> Composition:
        return (LONG_COMPOSITIONS if self.deterministic else COMPOSITIONS)[self.composition]

    def __str__(self) -> str:
        marks = {"cache": self.prefix_cache, "forced": self.forced, "deterministic": self.deterministic}
        words = [self.rung, self.model, self.composition, self.policy, self.prefill, self.runner]
        return "-".join([*words, f"stream{self.stream}", *(mark for mark, is_set in marks.items() if is_set)])


@cache
def recipe_of(rung: str, model: str, runner: str, deterministic: bool) -> Rung | None:
    recipe = replace(RECIPES[rung], runner=runner) if rung in RECIPES else LADDER[rung]
    if recipe.as_dict()["runner"] != runner:
        return None
    try:
        recipe.check_serves(arch_of(model))
        return recipe.invariant() if deterministic else recipe
    except RecipeError:
        return None


def arch_of(model: str) -> Arch:
    return small_config(**SMALL_MODELS[model][1]) if model in SMALL_MODELS else load_config(folder_of(model))


def axes_on(device: str) -> dict[str, tuple]:
    """Every axis with its values. Tuned launches need Triton, which would be interpreted on a CPU."""
    rungs = tuple(name for name in LADDER if device == "cuda" or LADDER[name].launch != "autotuned")
    both = (False, True)
    values = (
        MODELS, rungs, tuple(COMPOSITIONS), ("fifo", "pack"),
        ("whole", "budget", "several"), both, both, (0, 1, 3), ("eager", "graph"), both,
    )  # fmt: skip
    return dict(zip((field.name for field in fields(Combination)), values, strict=True))


def values_of(combination: Combination, n: int) -> set[tuple]:
    """Every ``n`` of its values, each with its axis."""
    return set(combinations(enumerate(astuple(combination)), n))


@cache
def covering_array(device: str, n: int) -> list[Combination]:
    """Allowed combinations in which every ``n`` of the drawn ones' values occur: the best of 40 each time
    (AETG, Cohen et al. 1997)."""
    axes, rng = axes_on(device), random.Random(0)
    drawn = (Combination(*map(rng.choice, axes.values())) for _ in range(2_000 if n == 1 else 20_000))
    missing = {combination: values_of(combination, n) for combination in drawn if combination.is_allowed()}
    chosen = []
    while missing:
        best = max(islice(missing, 40), key=lambda combination: len(missing[combination]))
        found = missing[best]
        missing = {one: rest for one, values in missing.items() if (rest := values - found)}
        chosen.append(best)
    return chosen


# Models, and what they generate alone.


@cache
def parts(name: str, device: str) -> tuple[Transformer, Tokenizer]:
    """A model in fp32 and its tokenizer."""
    if name in SHIPPED_MODELS:
        return load_parts(name, device, "float32")
    seed, shape = SMALL_MODELS[name]
    tokenizer = train_tokenizer([WORDS], 290)
    config = small_config(vocab_size=tokenizer.vocab_size, n_positions=256, **shape)
    return random_model(seed, config).to(torch.device(device), torch.float32), tokenizer


@cache
def alone(name: str, prompt: tuple[int, ...]) -> tuple[list[int], float]:
    """What plain ``dense`` on a CPU makes of a request that is all there is; by how much its tokens led."""
    engine = Engine(parts(name, "cpu")[0], recipe="dense", max_batch_size=1)
    sequence = engine.make_sequence(list(prompt), greedy(LONGEST_OUTPUT))
    engine.prefill([sequence])
    leads = [lead(engine)]
    while not sequence.is_finished:
        engine.decode([sequence])
        leads.append(lead(engine))
    engine.release(sequence)
    return sequence.output, min(leads)


def lead(engine: Engine) -> float:
    best, second = engine.step.last_logits()[0].topk(2).values.tolist()
    return best - second


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


# Requests.


@dataclass(frozen=True)
class Workload:
    """A request that is served first, so that its prefix may be cached, then those that come together."""

    primer: list[int]
    prompts: list[list[int]]
    outputs: tuple[int, ...]
    composition: Composition

    @classmethod
    def of(cls, combination: Combination) -> Workload:
        shape = combination.shape()
        vocab_size = parts(combination.model, "cpu")[0].config.vocab_size
        prefix, end, *suffixes = random_prompts([shape.prefix, 3, *shape.suffixes], PROMPT_SEED, vocab_size)
        outputs = tuple(n + MORE_OUTPUT * combination.forced for n in shape.outputs)
        return cls(prefix + end, [prefix + suffix for suffix in suffixes], outputs, shape)

    def expected(self, model: str) -> list[list[int]]:
        """The primer's tokens, then those of the others."""
        every = zip([self.primer, *self.prompts], [1, *self.outputs], strict=True)
        return [alone(model, tuple(prompt))[0][:n] for prompt, n in every]

    def num_kv_blocks(self, combination: Combination) -> int:
        """Too few, or enough for all at once and for the primer in the prefix cache."""
        if combination.forced:
            return self.composition.tight[combination.prefix_cache]
        lengths = [len(prompt) + n for prompt, n in zip(self.prompts, self.outputs, strict=True)]
        return sum(blocks_for(n, self.composition.block_size) for n in [*lengths, len(self.primer) + 1]) + 1


class Witness:
    """What an engine does: requests by their first chunks, chunks of each prefill, rows, cloned blocks."""

    def __init__(self, engine: Engine) -> None:
        self.first_seen: dict[int, None] = {}
        self.prefills: list[list[int]] = []
        self.rows: list[int] = []
        self.n_cut = self.n_clones = 0
        self._begin_prefill, self._begin_decode = engine.begin_prefill, engine.begin_decode
        engine.begin_prefill, engine.begin_decode = self._see_prefill, self._see_decode
        if isinstance(engine.blocks, KVBlocks):
            self._clone_block, engine.blocks.clone_block = engine.blocks.clone_block, self._see_clone

    def _see_prefill(self, sequences: list[Sequence], counts: list[int]) -> list[Sequence]:
        self.first_seen.update(dict.fromkeys(s.request_id for s in sequences))
        self.prefills.append(counts)
        whole = self._begin_prefill(sequences, counts)
        self.n_cut += len(sequences) - len(whole)
        return whole

    def _see_decode(self, sequences: list[Sequence]) -> int:
        self.rows.append(self._begin_decode(sequences))
        return self.rows[-1]

    def _see_clone(self, block_id: int, length: int) -> int:
        self.n_clones += 1
        return self._clone_block(block_id, length)


@dataclass(frozen=True)
class Served:
    """Results in the order of the requests, each one's pieces of text, and how often any was preempted."""

    outputs: list[RequestOutput]
    pieces: list[list[str]]
    preemptions: int


def serve(engine: Engine, config: SchedulerConfig, work: Workload, stream: int) -> Served:
    """The primer alone, to its end, then all others at once."""
    params = [greedy(n) for n in work.outputs]
    if not stream:
        scheduler = OfflineScheduler(engine, config)
        outputs = scheduler.run([work.primer], greedy(1)) + scheduler.run(work.prompts, params)
        return Served(outputs, [], scheduler.preemptions)
    with StreamingManager(engine, config, stream_interval=stream) as manager:
        ids = [manager.add_request(work.primer, greedy(1))]
        manager.result(ids[0], 60)
        all_are_there = Event()  # until then the worker is held back, so that it finds all of them
        manager._orders.put(lambda: all_are_there.wait(60))
        ids += [manager.add_request(prompt, own) for prompt, own in zip(work.prompts, params, strict=True)]
        all_are_there.set()
        pieces = [list(manager.stream_text(i)) for i in ids]
        return Served([manager.result(i, 60) for i in ids], pieces, manager._scheduler.preemptions)
