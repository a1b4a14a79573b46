"""Profile a decode step: its time by cause, and its calls, waits, copies and computations."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from torch.utils.flop_counter import FlopCounterMode

from rosellm.lab.diagnose.ceilings import Ceilings, find_ceilings
from rosellm.lab.diagnose.steps import STEPS, EngineSteps, Steps, Work
from rosellm.lab.records.account import WORKING, Row, account
from rosellm.lab.records.host_functions import HostFunction, host_functions
from rosellm.lab.records.ledger import of_unprofiled
from rosellm.lab.records.roles import operator_role
from rosellm.lab.records.trace import PROFILED_STEP, SYNC, Event, Trace, record_trace

COPYING = frozenset(
    ("cat", "clone", "contiguous", "copy_", "gather", "index", "index_select", "pad", "repeat", "stack")
    + ("repeat_interleave",)
)
READING_BACK = frozenset(("item", "_local_scalar_dense"))
REPEATS = 3
TRACED = 3  # steps
AGAIN = 2.0  # work counts as repeated if it is at least this multiple of the necessary work


@dataclass(frozen=True)
class Profile:
    """The profile of one decode step: times in µs, counts per step, and shares of the step from 0 to 1.

    step_us: the step's time without the profiler, the minimum of ``REPEATS`` means.
    stretched: time of a profiled step divided by ``step_us``.
    rows: the rows of the ledger, whose times add up to ``step_us`` (see ``lab.records.ledger``).
    functions: the costliest Python functions on the host, then all other functions as one entry.
    calls: number of launches on a GPU; on a CPU, of operators called from Python.
    waits: number of host waits for the GPU; on a CPU, of numbers read back by ``.item()``.
    waits_share: share of ``waits``; 0 for at most one wait, since the step's tokens need one.
    copied_share: share of the operators that only copy.
    copying: name of the most expensive operator that only copies.
    allocated: bytes of all tensors created.
    products: number of matrix-multiply operators called from Python.
    computed: FLOPs that PyTorch counts in a step; None for our engine, whose kernels it cannot count.
    """

    name: str
    work: Work
    ceilings: Ceilings
    step_us: float
    stretched: float
    rows: tuple[Row, ...]
    functions: tuple[HostFunction, ...]
    calls: float
    waits: float
    waits_share: float
    copied_share: float
    copying: str
    allocated: float
    products: float
    computed: float | None

    @property
    def on_gpu(self) -> bool:
        return self.work.device.type == "cuda"

    @property
    def idle_share(self) -> float:
        """Share of the step in which nothing runs: no kernel or copy on a GPU, no operator on a CPU."""
        return sum(row.share for row in self.rows if row.kind not in WORKING)

    @property
    def transfer_share(self) -> float:
        """Share of the step in which only copies between host and GPU run."""
        return sum(row.share for row in self.rows if row.kind == "copies")

    @property
    def calls_share(self) -> float:
        """Share that the calls would take if each were as cheap as a call on one element."""
        return self.calls * self.ceilings.call_us / self.step_us

    @property
    def reads(self) -> float:
        """Average number of GEMMs per weight matrix, counting only GEMMs called from Python."""
        return self.products / max(1, self.work.n_matrices)

    @property
    def reread_share(self) -> float:
        """Share spent on reading weight matrices repeatedly; 0 if ``reads`` is below ``AGAIN``."""
        return self._repeated_share(self.reads, "GEMM", "head")

    @property
    def times_computed(self) -> float:
        """FLOPs as a multiple of the FLOPs of one new token per sequence; 0 if unknown."""
        return (self.computed or 0.0) / self.work.flops

    @property
    def again_share(self) -> float:
        """Share spent on recomputing earlier tokens; 0 if ``times_computed`` is below ``AGAIN``."""
        return self._repeated_share(self.times_computed, "GEMM", "head", "attention")

    def _repeated_share(self, times: float, *causes: str) -> float:
        share = sum(row.share for row in self.rows if row.cause in causes)
        return (1 - 1 / times) * share if times >= AGAIN else 0.0

    @property
    def read_us(self) -> float:
        """The µs to read all bytes of a step once, at the measured read ceiling."""
        return self.work.read_bytes / self.ceilings.read_bytes_per_us

    @property
    def compute_us(self) -> float:
        """The µs to multiply with all weights, at the measured FLOPs ceiling."""
        return self.work.flops / self.ceilings.flops_per_us

    @property
    def read_share(self) -> float:
        """``read_us`` as a share of the step; 0 if ``compute_us`` is larger."""
        return self.read_us / self.step_us if self.read_us >= self.compute_us else 0.0

    @property
    def compute_share(self) -> float:
        """``compute_us`` as a share of the step; 0 unless it is larger than ``read_us``."""
        return self.compute_us / self.step_us if self.compute_us > self.read_us else 0.0

    @property
    def floor_us(self) -> float:
        """The shortest possible step in µs: the larger of ``read_us`` and ``compute_us``."""
        return max(self.read_us, self.compute_us)


def profile_of(steps: Steps) -> Profile:
    """Time and trace ``steps``, and return their profile. Raises ``LedgerError`` if a step runs nothing."""
    work, on_gpu = steps.work, steps.work.device.type == "cuda"
    ceilings = find_ceilings(work.device, work.dtype, work.read_bytes)
    mean_us(steps)
    step_us = min(mean_us(steps) for _ in range(REPEATS))
    steps.prepare()
    trace = record_trace(lambda: steps.run(TRACED))
    steps.prepare()
    functions = host_functions(lambda: steps.run(STEPS), STEPS)
    rows, inside = account(trace), trace.within(PROFILED_STEP)
    n, profiled_us = len(trace.ranges(PROFILED_STEP)), sum(row.us for row in rows)
    copies, copying = copies_of(inside)
    waits = inside.of("sync") if on_gpu else [op for op in inside.of("op") if _short(op) in READING_BACK]
    waits_share = sum(row.share for row in rows if row.cause == SYNC) if on_gpu else share_of(waits, trace)
    return Profile(
        name=steps.name,
        work=work,
        ceilings=ceilings,
        step_us=step_us,
        stretched=profiled_us / step_us,
        rows=of_unprofiled(rows, step_us, trace.on_gpu),
        functions=functions,
        calls=calls_in(inside) / n,
        waits=len(waits) / n,
        waits_share=waits_share if len(waits) > n else 0.0,
        copied_share=share_of(copies, trace, profiled_us if on_gpu else None),
        copying=copying,
        allocated=inside.allocated_bytes / n,
        products=sum(operator_role(op.name) == "GEMM" for op in inside.of("op")) / n,
        computed=None if isinstance(steps, EngineSteps) else computed_flops(steps),
    )


def mean_us(steps: Steps, n: int = STEPS) -> float:
    """Return the mean µs per step of ``n`` steps, from the end of the first step to the end of the last."""
    steps.prepare()
    ends = steps.run(n)
    return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e6


def calls_in(trace: Trace) -> int:
    """Count operators called from Python or, on a GPU, host launches (one per captured graph)."""
    return len({e.started for e in trace.of("kernel")}) if trace.on_gpu else len(trace.of("op"))


def copies_of(trace: Trace) -> tuple[list[Event], str]:
    """Return the copying operators, or on a GPU their kernels, and the name of the costliest operator."""
    ops = trace.of("op")
    starts = [op.start for op in ops]
    copies, us = [], defaultdict[str, float](float)
    for event in trace.of("kernel") + trace.of("copy") if trace.on_gpu else ops:
        op = ops[i] if (i := bisect_right(starts, event.started) - 1) >= 0 else None
        if op and event.started <= op.start + op.duration and _short(op) in COPYING:
            copies.append(event)
            us[_short(op)] += event.duration
    return copies, max(us, key=us.__getitem__, default="")


def share_of(events: list[Event], trace: Trace, step_us: float | None = None) -> float:
    """Return the share of a profiled step that ``events`` take, the median over the steps of ``trace``.

    step_us: µs of a step; None means each step's own length.
    """
    return median(
        sum(e.duration for e in events if step.start <= e.started <= step.start + step.duration)
        / (step_us or step.duration)
        for step in trace.ranges(PROFILED_STEP)
    )


def computed_flops(steps: Steps) -> float:
    """Return the floating-point operations of one step that PyTorch's ``FlopCounterMode`` counts.

    The result is the difference between a run of three steps and a run of two.
    """
    counted = []
    for n in (2, 3):
        steps.prepare()
        with FlopCounterMode(display=False) as counter:
            steps.run(n)
        counted.append(counter.get_total_flops())
    return float(counted[1] - counted[0])


def _short(op: Event) -> str:
    return op.name.rpartition("::")[2]
