"""Try a reader's own kernel as a rung: ``try_rung("my_idea", base="dependent_launch", add_norm=my_kernel)``.

Nothing in the package is edited. The kernel is checked against its specification, then the whole engine runs
with it and must generate the tokens of the base rung; then the steps of both are timed in alternation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from IPython.display import display
from torch.profiler import record_function

from rosellm.errors import RecipeError, describe
from rosellm.lab.figures.bars import waterfall
from rosellm.lab.figures.charts import Chart, show, show_table
from rosellm.lab.figures.ladder import ladder_chart
from rosellm.lab.records.bench import Bench, get_model, make_prompts
from rosellm.lab.records.ledger import Ledger, step_ledger, tokens_needed
from rosellm.lab.records.machines import find_machines
from rosellm.lab.records.parameters import check_parameters
from rosellm.lab.records.records import REFERENCE, Results, percent_change
from rosellm.lab.records.roles import Marked
from rosellm.lab.records.step_time import StepTimes, measure_steps, prompt_length, recorded_steps, room
from rosellm.lab.trying.called_by import ROLES, refusal
from rosellm.lab.trying.check_kernel import KernelError, Verdict, check_kernel, check_name, triton_kernels
from rosellm.lab.trying.same_tokens import LONG, Replaced, same_tokens
from rosellm.models.checkpoint import SHIPPED_MODELS
from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels.table import Kernels, choose_kernels
from rosellm.roseinfer.recipe import LADDER, check_launch, get_rung

GROUPED_MODEL = SHIPPED_MODELS[1]  # six query and two KV heads, rotary embeddings, SwiGLU
EFFORT: dict[str, dict[str, Any]] = {
    "cpu": {"engines": 1, "seconds": 0.0, "turns": 2},
    "cuda": {"engines": 3, "seconds": 1.0, "turns": 5},
}


@dataclass
class TriedRung:
    """A rung with a reader's kernels that passed all checks, and its comparison with the rung ``base``.

    ours: the kernels of the base rung.
    replaced: the reader's kernels, by name.
    batch: sequences per step.
    context: cached tokens of each sequence, halfway through the timed steps.
    verdicts: the results of the checks against the specifications.
    models: names of the models on which the tokens were compared.
    calls: number of calls of each kernel in that comparison.
    results: the records of the ladder to compare with.
    """

    name: str
    base: str
    model: Transformer
    ours: Kernels
    replaced: Replaced
    batch: int
    context: int
    verdicts: tuple[Verdict, ...]
    models: tuple[str, ...]
    calls: Mapping[str, int]
    results: Results

    def __str__(self) -> str:
        called = ", ".join(f"{name} {n:,} times" for name, n in self.calls.items())
        models = " and ".join(self.models)
        tokens = f"{self.name} gives the tokens of {self.base} on {models}"
        return "\n".join([*map(str, self.verdicts), tokens, f"the engine called {called}"])

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter, whose time says nothing about a GPU, runs a kernel of either rung."""
        base_is = self.model.device.type == "cpu" and self.ours.name == "triton"
        return base_is or any(verdict.interpreted for verdict in self.verdicts)

    def _check_timed(self) -> None:
        """Raise KernelError if Triton's interpreter runs a kernel of either rung."""
        if self.is_interpreted:
            raise KernelError(
                f"{self.name} is not timed: Triton's interpreter runs here, and its time says nothing of a "
                "GPU"
            )

    @cached_property
    def step_times(self) -> dict[str, StepTimes]:
        """The step times of the base rung and of this rung, by name, measured in alternation.

        Raises KernelError if a kernel is interpreted.
        """
        self._check_timed()
        lengths = prompt_length(self.context), room()
        sides = {name: partial(self._bench, kernels, *lengths) for name, kernels in self._sides.items()}
        return measure_steps(sides, **EFFORT[self.model.device.type])

    def steps(self) -> None:
        """Display the step times of both rungs in µs; print one line if a kernel is interpreted."""
        with _printed():
            rows: list[list[Any]] = []
            for name, one in self.step_times.items():
                turns = [us for own in one.turns_us for us in own]
                rows.append([name, one.us, min(turns), max(turns)])
            change = f"{self.name}: {percent_change(rows[0][1], rows[1][1])}"
            show_table(["step, µs", "median", "fastest turn", "slowest turn"], rows, change)

    def ladder(self, workload: str = "W1") -> Chart:
        """Chart speeds relative to the base rung: the recorded ladder's, and this rung's, measured here.

        On a CPU, this rung has no value, since its ratio would say nothing about a GPU. Raises KernelError if
        no step of the base rung was recorded.
        """
        steps = recorded_steps(self.results, workload)
        if self.base not in steps:
            raise KernelError(
                f"no step of {self.base} was recorded at {workload}: there is no ladder to stand on"
            )
        speeds: dict[str, float | None] = {}
        for rung, one in steps.items():
            speeds[rung] = steps[self.base].us / one.us
            if rung == self.base:
                speeds[self.name] = None
        if self.model.device.type == "cuda":
            speeds[self.name] = self.step_times[self.base].us / self.step_times[self.name].us
        title = (
            f"Steps a second, {self.base} = 1: {workload} recorded on {self.results.device_name}, "
            f"{self.name} against {self.base} on this machine"
        )
        return ladder_chart(speeds, f"× {self.base}", title=title)

    def show_ladder(self, workload: str = "W1") -> None:
        """Display :meth:`ladder`; print one line on a CPU, whose times do not belong on a GPU's ladder."""
        if self.model.device.type == "cpu":
            print(f"{self.name} has no place on the ladder of {self.results.device_name}: it ran on a CPU")
        else:
            show(self.ladder(workload))

    @cached_property
    def ledgers(self) -> tuple[Ledger, Ledger]:
        """The ledgers of a step of the base rung and of this rung; replaced kernels have separate rows.

        On a GPU, a Triton kernel is identified by its name; torch operators are identified only if the host
        launches them, not in a captured graph. Raises KernelError if a kernel is interpreted.
        """
        self._check_timed()
        old, new = (self._ledger(name, kernels) for name, kernels in self._sides.items())
        return old, new

    def ledger(self) -> None:
        """Display this rung's ledger; print one line if a kernel is interpreted."""
        with _printed():
            display(self.ledgers[1])

    def waterfall(self) -> None:
        """Display a waterfall from the base rung's step to this one's; print a line if it is interpreted."""
        with _printed():
            show(waterfall(*self.ledgers))

    @property
    def _sides(self) -> dict[str, Kernels]:
        return {self.base: self.ours, self.name: replace(self.ours, **dict[str, Any](self.replaced))}

    def _bench(self, kernels: Kernels, prompt_tokens: int, new_tokens: int) -> Bench:
        prompts = make_prompts(self.batch, prompt_tokens, self.model.config.vocab_size)
        return Bench(self.model, self.base, prompts, new_tokens, gate_from=1, kernels=kernels)

    def _ledger(self, name: str, kernels: Kernels) -> Ledger:
        marked, ranged = [], dict[str, Any]()
        for kernel in self.replaced:
            mine = getattr(kernels, kernel)
            launched = triton_kernels(kernel, mine, self.model.device)
            marked.append(Marked(f"kernel {kernel}", ROLES[kernel].name, launched))
            ranged[kernel] = record_function(f"rosellm.lab.trying.kernel {kernel}")(mine)
        prompt_tokens = max(1, self.context - tokens_needed() // 2)
        bench = self._bench(replace(kernels, **ranged), prompt_tokens, 1 + tokens_needed())
        return replace(step_ledger(bench, marked=marked), name=name)


@contextmanager
def _printed() -> Iterator[None]:
    """Print a KernelError that the context raises, instead of propagating it."""
    try:
        yield
    except KernelError as error:
        print(error)


def try_rung(
    name: str,
    *,
    base: str,
    model: str = "rose-tiny",
    load_format: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    batch: int = 6,
    context: int = 64,
    seed: int | None = None,
    record: str = REFERENCE,
    **kernels: Callable[..., Any],
) -> TriedRung:
    """Return the rung ``base`` with ``kernels`` replaced, under the name ``name``, if they are correct.

    name: a name that no rung of the ladder has.
    batch: sequences per step when the returned rung is timed.
    context: cached tokens per sequence when the returned rung is timed; such a context is also checked.
    seed: seed of the inputs of the check; None draws a new seed each time.
    record: folder of the recorded ladder to compare with; of several, as in ``open_rung``, the last is used.
    kernels: functions in Triton or plain torch, by name, with the interface of the specification of the same
        name in ``kernels.table.Kernels``.

    First, each kernel is checked against its specification (:func:`check_kernel`). Then the engine runs with
    the kernels, in fp32, on the model and on a small model with grouped queries, greedily and with sampling:
    the tokens must equal those of the base rung, and each kernel must be called.

    Raises KernelError for a kernel that is wrong or that the base rung never calls, RecipeError for an
    unknown rung or a base that this device or model cannot run, or ParameterError.
    """
    base = get_rung(base)
    _check_names(name, base, kernels)
    transformer = get_model(model, device, dtype, load_format)
    check_launch(LADDER[base], transformer.device)
    LADDER[base].check_serves(transformer.config)
    check_parameters(transformer, batch=batch, prompt_tokens=context, new_tokens=room())
    *_, results = find_machines(record)
    sizes: dict[str, Any] = {"model": transformer.config, "dtype": transformer.dtype, "context": context}
    checks = (
        check_kernel(one, kernels[one], seed=seed, device=transformer.device, **sizes) for one in kernels
    )
    verdicts = tuple(checks)
    if wrong := [str(verdict) for verdict in verdicts if not verdict.passed]:
        raise KernelError("\n".join(wrong))
    ours = _one_by_one(base, transformer.device)
    served = {model: get_model(model, device, "float32", load_format)}
    grouped = get_model(GROUPED_MODEL, device, "float32")
    with suppress(RecipeError):
        LADDER[base].check_serves(grouped.config)
        served.setdefault(GROUPED_MODEL, grouped)
    calls = same_tokens(name, base, ours, kernels, served, max(context, LONG))[model]
    found = verdicts, tuple(served), calls, results
    return TriedRung(name, base, transformer, ours, kernels, batch, context, *found)


def _check_names(name: str, base: str, kernels: Replaced) -> None:
    if not isinstance(name, str) or not name or name in LADDER:
        raise KernelError(f"name is {describe(name)}; give your rung a name that no rung of the ladder has")
    if not kernels:
        raise KernelError("there is no kernel to replace; give one by its name, such as add_norm=my_kernel")
    for one, kernel in kernels.items():
        check_name(one, kernel)
        if reason := refusal(one, base):
            raise KernelError(reason)


def _one_by_one(base: str, device: torch.device) -> Kernels:
    """Return the kernels of the base rung, in a form in which the engine calls each torch kernel separately.

    Otherwise, an engine on a CPU packs weights for oneDNN, or computes what layers share only once per step.
    The persistent rung has no such form on a CPU.
    """
    kernels = choose_kernels("auto", LADDER[base].launch, device)
    if kernels.name != "torch" or LADDER[base].exhibit == "persistent_layers":
        return kernels
    attend = kernels.append_and_attend  # wrapped, so that the engine does not recognise it
    return replace(kernels, name="torch, one by one", append_and_attend=lambda **o: attend(**o))
