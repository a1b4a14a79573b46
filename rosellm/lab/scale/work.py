"""The work of a decode step or a prefill on one rank, as floors: µs at a device's ceilings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rosellm.lab.records.floors import Ceiling, floors_us, prefill_floors_us
from rosellm.models.arch import Arch
from rosellm.models.part import Part

DECODE_TERMS = ("a layer, µs", "weights", "weights of several rows", "attention", "activations")
PREFILL_TERMS = (
    "a layer, µs",
    "products",
    "products of many tokens",
    "attention",
    "activations",
    "a prompt, µs",
)
MANY_TOKENS = 4096  # per pass
ACTIVATIONS = ("norm", "elementwise", "embedding", "append")


@dataclass(frozen=True)
class Cut:
    """A model of ``itemsize`` bytes per element, sharded equally over ``ranks`` such devices."""

    whole: Arch
    ceiling: Ceiling
    itemsize: int = 2
    ranks: int = 1

    def on(self, ranks: int) -> Cut:
        """Return the same model on ``ranks`` ranks."""
        return replace(self, ranks=ranks)

    @cached_property
    def part(self) -> Arch:
        """A rank's shard, except that its head is ``1 / ranks`` of the whole. Raises ``OptionError``."""
        part = Part(0, self.ranks)
        part.check(self.whole)
        return part.arch(self.whole)

    @property
    def sums(self) -> int:
        """All-reduces in a pass: after attention and after the MLP of each layer."""
        return 2 * self.whole.n_layers * (self.ranks > 1)

    def sum_bytes(self, rows: float) -> float:
        """Return the bytes of one all-reduce."""
        return rows * self.whole.d_model * self.itemsize

    def decode(self, rows: int, context: float) -> tuple[float, ...]:
        """Return ``DECODE_TERMS`` of a step of ``rows`` rows with ``context`` cached tokens each."""
        floors = floors_us(self.part, rows, context, self.itemsize, self.ceiling)
        weights = floors["GEMM"] + floors["head"] / self.ranks
        return self.whole.n_layers, weights, weights * (rows > 1), floors["attention"], _activations(floors)

    def prefill(self, prompts: float, tokens: float) -> tuple[float, ...]:
        """Return ``PREFILL_TERMS`` of a pass of ``prompts`` equally long prompts with ``tokens`` in total."""
        floors = prefill_floors_us(self.part, prompts, tokens / prompts, self.itemsize, self.ceiling)
        products = floors["GEMM"] + floors["head"] / self.ranks
        many = products * (tokens > MANY_TOKENS)
        return self.whole.n_layers, products, many, floors["attention"], _activations(floors), prompts

    @property
    def pair_us(self) -> float:
        """µs of a query-key pair, in all layers and heads of a rank."""
        return 4 * self.part.n_layers * self.part.attention_width / self.ceiling.flops_per_us


def _activations(floors: dict[str, float]) -> float:
    return sum(floors[cause] for cause in ACTIVATIONS)
