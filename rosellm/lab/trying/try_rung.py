"""Try a reader's own kernel as a rung: ``try_rung("my_idea", base="dependent_launch", add_norm=my_kernel)``.

Nothing in the package is edited. The kernel is checked against its specification, then the whole engine runs
with it and must generate the tokens of the base rung; then the steps of both are timed in alternation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from IPython.display import display
from torch.profiler import record_function

from rosellm.errors import RecipeError, describe
from rosellm.lab.figures.charts import Chart, show, show_table
from rosellm.lab.figures.ladder import ladder_chart
from rosellm.lab.figures.ledger import waterfall
from rosellm.lab.records.bench import Bench, get_model, make_prompts
from rosellm.lab.records.ledger import Ledger, step_ledger, tokens_needed
from rosellm.lab.records.machines import check_same_size, find_machines, name_of
from rosellm.lab.records.parameters import check_parameters
from rosellm.lab.records.records import REFERENCE, RecordError, Results, percent_change
from rosellm.lab.records.roles import Marked
from rosellm.lab.records.step_time import StepTimes, measure_steps, prompt_length, recorded_steps, room
from rosellm.lab.trying.called_by import refusal
from rosellm.lab.trying.case import ODD, USES
from rosellm.lab.trying.check_kernel import (
    KernelError,
    Verdict,
    check_kernel,
    check_name,
    faults_of,
    launches,
)
from rosellm.lab.trying.same_tokens import LONG, same_tokens
from rosellm.models.checkpoint import SHIPPED_MODELS
from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels.table import Kernels, choose_kernels
from rosellm.roseinfer.recipe import LADDER, check_launch, get_rung

GROUPED_MODEL = SHIPPED_MODELS[1]  # six query and two KV heads, rotary embeddings, SwiGLU
EFFORT: dict[str, dict[str, Any]] = {
    "cpu": {"engines": 1, "seconds": 0.0, "turns": 3},
    "cuda": {"engines": 3, "seconds": 1.0, "turns": 5},
}
# A kernel's role in a ledger, from the point of view of neighbouring work.
ROLES = {
    "paged_attention_decode": "attention",
    "kv_append": "append",
    "kv_append_full_batch": "append",
    "kv_append_identity_pos": "append",
    "prefill_attention": "attention",
    "position_heads": "elementwise",
    "gumbel_noise": "sampling",
    "append_and_attend": "attention",
    "plan_attention": "attention",
    "embed": "embedding",
    "add_norm": "norm",
    "silu_mul": "elementwise",
    "few_rows_linear": "GEMM",
    "some_rows_linear": "GEMM",
    "best_tokens": "head",
    "advance": "sampling",
}
Replaced = Mapping[str, Callable[..., Any]]


@dataclass
class TriedRung:
    """A rung that passed: its kernels match their specifications, and its tokens those of ``base``.

    ours: the base rung's kernels, as compared with; replaced: the reader's, by name. batch: sequences per
    step; context: cached tokens halfway through the timed steps. calls: of each kernel in the token check.
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
    others: tuple[Results, ...] = ()

    def __str__(self) -> str:
        called = ", ".join(f"{name} {n:,} times" for name, n in self.calls.items())
        models = " and ".join(self.models)
        tokens = f"{self.name} gives the tokens of {self.base} on {models}"
        return "\n".join([*map(str, self.verdicts), tokens, f"the engine called {called}"])

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs a kernel of either side: its time says nothing about a GPU."""
        base_is = self.model.device.type == "cpu" and self.ours.name == "triton"
        return base_is or any(verdict.interpreted for verdict in self.verdicts)

    @cached_property
    def step_times(self) -> dict[str, StepTimes]:
        """The steps of the base rung and of this one, timed in alternation.

        Raises KernelError if interpreted.
        """
        if self.is_interpreted:
            raise KernelError(f"{self._untimed}; on a GPU it is timed")
        return measure_steps(
            {
                name: partial(self._bench, kernels, prompt_length(self.context), room())
                for name, kernels in self._sides
            },
            **EFFORT[self.model.device.type],
        )

    def steps(self) -> None:
        """Display both steps in µs; print one line for an interpreted kernel."""
        if self.is_interpreted:
            print(self._untimed)
            return
        old, new = self.step_times.values()
        turns = {name: [us for own in one.turns_us for us in own] for name, one in self.step_times.items()}
        rows = [[name, self.step_times[name].us, min(own), max(own)] for name, own in turns.items()]
        change = f"{self.name}: {percent_change(old.us, new.us)}"
        show_table(["step, µs", "median", "fastest turn", "slowest turn"], rows, change)

    def ladder(self, workload: str = "W1") -> Chart:
        """Chart the recorded ladder's speeds relative to the base rung, and this rung's, measured here.

        Includes the ladders of ``others`` relative to their own base rung. On a CPU this rung has a row
        without a value: its ratio would say nothing about a GPU.
        """
        recorded = {name: one.us for name, one in recorded_steps(self.results, workload).items()}
        if self.base not in recorded:
            raise KernelError(
                f"no step of {self.base} was recorded at {workload}: there is no ladder to stand on"
            )
        speeds: dict[str, float | None] = {}
        for rung, us in recorded.items():
            speeds[rung] = recorded[self.base] / us
            if rung == self.base:
                speeds[self.name] = self._speed if self.model.device.type == "cuda" else None
        title = (
            f"Steps a second, {self.base} = 1: {workload} recorded on {self.results.device_name}, "
            f"{self.name} against {self.base} on this machine"
        )
        return ladder_chart(speeds, f"× {self.base}", title=title, beside=self._beside(workload))

    def _beside(self, workload: str) -> dict[str, dict[str, float]]:
        """Return machine → rung → its speed relative to the base rung's; {} for a machine without it."""
        beside: dict[str, dict[str, float]] = {}
        for results in self.others:
            steps: dict[str, StepTimes] = {}
            with suppress(RecordError):
                check_same_size(results, self.results, f"steps-{workload}")
                steps = recorded_steps(results, workload)
            known = steps.items() if self.base in steps else ()
            beside[name_of(results)] = {rung: steps[self.base].us / one.us for rung, one in known}
        return beside

    def show_ladder(self, workload: str = "W1") -> None:
        """Display :meth:`ladder`; print one line on a CPU, whose times do not belong on a GPU's ladder."""
        if self.model.device.type == "cpu":
            print(f"{self.name} has no place on the ladder of {self.results.device_name}: it ran on a CPU")
        else:
            show(self.ladder(workload))

    @cached_property
    def ledgers(self) -> tuple[Ledger, Ledger]:
        """The ledgers of the base rung's step and of this one; replaced kernels have separate rows.

        On a GPU a Triton kernel is identified by its name. A kernel of torch operators is identified only
        where the host launches them, not in a captured graph.
        """
        if self.is_interpreted:
            raise KernelError(f"{self._untimed}; a ledger of it needs a GPU")
        tables = dict(self._sides)
        old, new = (self._ledger(name, tables[name]) for name in (self.base, self.name))
        return old, new

    def ledger(self) -> None:
        """Display this rung's ledger; print one line for an interpreted kernel."""
        if self.is_interpreted:
            print(self._untimed)
        else:
            display(self.ledgers[1])

    def waterfall(self) -> None:
        """Chart the change from the base rung's step by cause; print one line for an interpreted kernel."""
        if self.is_interpreted:
            print(self._untimed)
        else:
            show(waterfall(*self.ledgers))

    @property
    def _untimed(self) -> str:
        return f"{self.name} is not timed: Triton's interpreter runs here, and its time says nothing of a GPU"

    @property
    def _speed(self) -> float:
        return self.step_times[self.base].us / self.step_times[self.name].us

    @property
    def _sides(self) -> list[tuple[str, Kernels]]:
        return [(self.base, self.ours), (self.name, replace(self.ours, **dict[str, Any](self.replaced)))]

    def _bench(self, kernels: Kernels, prompt_tokens: int, new_tokens: int) -> Bench:
        prompts = make_prompts(self.batch, prompt_tokens, self.model.config.vocab_size)
        return Bench(self.model, self.base, prompts, new_tokens, gate_from=1, kernels=kernels)

    def _ledger(self, name: str, kernels: Kernels) -> Ledger:
        marked: list[Marked] = []
        ranged: dict[str, Any] = {}
        for kernel in self.replaced:
            mine = getattr(kernels, kernel)
            with launches() as launched:
                for option in range(USES):
                    faults_of(kernel, mine, replace(ODD, option=option), 0, self.model.device)
            mark = Marked(f"kernel {kernel}", ROLES[kernel], frozenset(one.name for one in launched))
            marked.append(mark)
            ranged[kernel] = _in_range(mine, f"rosellm.lab.trying.{mark.name}")
        prompt_tokens = max(1, self.context - tokens_needed() // 2)
        bench = self._bench(replace(kernels, **ranged), prompt_tokens, 1 + tokens_needed())
        return replace(step_ledger(bench, marked=marked), name=name)


def _in_range(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    def ranged(*arguments: Any, **named: Any) -> Any:
        with record_function(name):
            return kernel(*arguments, **named)

    return ranged


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

    kernels: functions with the interface of the equally named specifications in ``kernels.table.Kernels``, in
    Triton or plain torch. First each is checked against its specification (:func:`check_kernel`; seed None
    draws new inputs each time). Then the engine runs with them, in fp32, on the model and on a small one with
    grouped queries, greedily and with sampling: its tokens must equal the base rung's, and each kernel must
    be called. batch, context: of the steps that are then timed; a context of that many tokens is checked,
    too. record: record folders to compare with, as in ``open_rung``.

    Raises KernelError for a kernel that is wrong or that the base rung never calls, RecipeError for an
    unknown rung or a base that this device or model cannot run, or ParameterError.
    """
    base = get_rung(base)
    _check_names(name, base, kernels)
    transformer = get_model(model, device, dtype, load_format)
    check_launch(LADDER[base], transformer.device)
    LADDER[base].check_serves(transformer.config)
    check_parameters(transformer, batch=batch, prompt_tokens=context, new_tokens=room())
    results, *others = find_machines(record)
    verdicts = _proved(kernels, transformer, seed, context)
    ours = _one_by_one(base, transformer.device)
    served = _served(base, model, device, load_format)
    calls = same_tokens(name, base, ours, kernels, served, max(context, LONG))[model]
    found = verdicts, tuple(served), calls, results, tuple(others)
    return TriedRung(name, base, transformer, ours, kernels, batch, context, *found)


def _proved(kernels: Replaced, model: Transformer, seed: int | None, context: int) -> tuple[Verdict, ...]:
    """Check all kernels. Raises KernelError if one is wrong."""
    asked: dict[str, Any] = {"seed": seed, "device": model.device, "context": context}
    asked |= {"model": model.config, "dtype": model.dtype}
    verdicts = tuple(check_kernel(name, kernel, **asked) for name, kernel in kernels.items())
    if wrong := [str(verdict) for verdict in verdicts if not verdict.passed]:
        raise KernelError("\n".join(wrong))
    return verdicts


def _served(base: str, model: str, device: str, load_format: str) -> dict[str, Transformer]:
    """Return the model in fp32 and, if the rung supports it, the one with grouped queries."""
    served = {model: get_model(model, device, "float32", load_format)}
    if model != GROUPED_MODEL and _serves(base, grouped := get_model(GROUPED_MODEL, device, "float32")):
        served[GROUPED_MODEL] = grouped
    return served


def _check_names(name: str, base: str, kernels: Replaced) -> None:
    if not isinstance(name, str) or not name or name in LADDER:
        raise KernelError(f"name is {describe(name)}; give your rung a name that no rung of the ladder has")
    if not kernels:
        raise KernelError("there is no kernel to replace; give one by its name, such as add_norm=my_kernel")
    for one, kernel in kernels.items():
        check_name(one, kernel)
        if reason := refusal(one, base):
            raise KernelError(reason)


def _serves(base: str, model: Transformer) -> bool:
    try:
        LADDER[base].check_serves(model.config)
    except RecipeError:
        return False
    return True


def _one_by_one(base: str, device: torch.device) -> Kernels:
    """Return the base rung's kernels; torch's are called one by one, like Triton's.

    Otherwise an engine on a CPU packs weights for oneDNN, or computes what layers share once per step. (The
    persistent rung has no such form there.)
    """
    kernels = choose_kernels("auto", LADDER[base].launch, device)
    if kernels.name != "torch" or LADDER[base].exhibit == "persistent_layers":
        return kernels
    return replace(kernels, name="torch, one by one", append_and_attend=_alone(kernels.append_and_attend))


def _alone(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that the engine does not recognise it."""
    return lambda **operands: kernel(**operands)
