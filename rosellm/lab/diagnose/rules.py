"""Rules for what bounds a step: one per cause, with a threshold and a sentence that states its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rosellm.lab.diagnose.profile import Profile
from rosellm.lab.records.records import number

# Thresholds of the rules: shares of a step, except AGAIN, a multiple of the necessary work.
IDLE, CALLS, COPIES, WAITS, TRANSFERS, NEAR, AGAIN = 0.25, 0.3, 0.1, 0.1, 0.1, 0.4, 2.0
MULTIPLYING = ("GEMM", "head", "attention")


@dataclass(frozen=True)
class Finding:
    """A cause, the share of the step that it takes, and a sentence.

    bound: the largest speedup in tokens per second from removing the cause; None for a ceiling, where only
    less work helps.
    """

    cause: str
    share: float
    sentence: str
    bound: float | None = None


def findings(profile: Profile) -> tuple[Finding, ...]:
    """Return the findings for a step, largest share first."""
    found = [finding for rule in RULES if (finding := rule(profile)) is not None]
    return tuple(sorted(found, key=lambda finding: -finding.share))


def idle(p: Profile) -> Finding | None:
    """Share from ``IDLE``: the host does not keep the GPU busy; on a CPU, Python between the operators."""
    share = p.idle_share
    if share < IDLE:
        return None
    if p.on_gpu:
        told = (
            f"launch-bound: the GPU idles {percent(share)} of a step while the host makes {number(p.calls)} "
            f"launches, each of which takes it {number(p.ceilings.call_us)} µs or more"
        )
        return _removable("launch", share, told)
    named = [function for function in p.functions if function.is_one]
    most = max(named, key=lambda function: function.us, default=None)
    told = f"Python: in {percent(share)} of a step no operator runs"
    told += f"; the function that takes most of the host's time is {most.name}" if most else ""
    return _removable("Python", share, told)


def calls(p: Profile) -> Finding | None:
    """Share from ``CALLS``, CPU only: calling that many operators takes this share, whatever they do."""
    if p.on_gpu or p.calls_share < CALLS:
        return None
    told = (
        f"call-bound: a step calls {number(p.calls)} operators; at {number(p.ceilings.call_us)} µs each, "
        f"however small their tensors, that is {percent(p.calls_share)} of it: fewer and larger ones help"
    )
    return _removable("calls", p.calls_share, told)


def again(p: Profile) -> Finding | None:
    """From ``AGAIN`` times the FLOPs of one new token per sequence: the past is recomputed, not cached."""
    if p.computed is None or (times := p.computed / p.work.flops) < AGAIN:
        return None
    share = (1 - 1 / times) * sum(row.share for row in p.rows if row.cause in MULTIPLYING)
    told = (
        f"computes the past again: {number(times)} times the operations of one new token a sequence; "
        "a KV cache keeps the rest"
    )
    return _removable("again", share, told)


def reread(p: Profile) -> Finding | None:
    """From ``AGAIN`` GEMMs per matrix: each reads the matrix for only some of the sequences."""
    if p.reads < AGAIN:
        return None
    share = (1 - 1 / p.reads) * sum(row.share for row in p.rows if row.cause in ("GEMM", "head"))
    told = (
        f"reads weights again: {number(p.products)} products a step for {p.work.n_matrices} matrices; one "
        "forward for all sequences reads them once"
    )
    return _removable("reread", share, told)


def copies(p: Profile) -> Finding | None:
    """Share from ``COPIES``: operators that only move data, such as copying a cache to grow it."""
    if p.copied_share < COPIES:
        return None
    cached = f", {number(p.work.kv_bytes / 1e6)} MB of keys and values are cached" if p.work.kv_bytes else ""
    told = (
        f"copies: operators that only move data take {percent(p.copied_share)} of a step, `{p.copying}` most "
        f"of it; a step makes {number(p.allocated / 1e6)} MB of new tensors{cached}: write and read in place"
    )
    return _removable("copies", p.copied_share, told)


def waits(p: Profile) -> Finding | None:
    """Share from ``WAITS``, with more than one wait per step: the host reads numbers back."""
    if p.waits <= 1 or p.waits_share < WAITS:
        return None
    if p.on_gpu:
        told = (
            f"waits: {number(p.waits)} times a step the host waits for the GPU (`.item()`, copies to or from "
            f"pageable memory); in {percent(p.waits_share)} of it nothing runs for that"
        )
    else:
        told = f"waits: `.item()`, {number(p.waits)} times a step, takes {percent(p.waits_share)} of it"
    return _removable("waits", p.waits_share, told)


def transfers(p: Profile) -> Finding | None:
    """Share from ``TRANSFERS``, GPU only: nothing runs but copies to or from the host, or fills."""
    if not p.on_gpu or p.transfer_share < TRANSFERS:
        return None
    told = f"transfers: in {percent(p.transfer_share)} of a step the GPU only copies; keep inputs on it"
    return _removable("transfers", p.transfer_share, told)


def bandwidth(p: Profile) -> Finding | None:
    """Share from ``NEAR``: reading weights and cache once, at the ceiling, takes this much of the step."""
    share = p.read_us / p.step_us
    if share < NEAR or p.compute_us > p.read_us:
        return None
    fewer = "16-bit weights, " if p.work.dtype.itemsize > 2 else ""
    told = (
        f"bandwidth-bound: reads {percent(min(share, 1))} of what this machine sustains, "
        f"{number(p.work.read_bytes / 1e6)} MB a step; what is left is fewer bytes a token ({fewer}keys that "
        "heads share, a larger batch)"
    )
    return Finding("bandwidth", share, told)


def compute(p: Profile) -> Finding | None:
    """Share from ``NEAR``: the necessary GEMMs, at the ceiling, take this much of the step."""
    share = p.compute_us / p.step_us
    if share < NEAR or p.read_us >= p.compute_us:
        return None
    told = (
        f"compute-bound: multiplies at {percent(min(share, 1))} of what this machine sustains in "
        f"{dtype_name(p)}; a larger batch gives no more tokens a second"
    )
    return Finding("compute", share, told)


RULES: tuple[Callable[[Profile], Finding | None], ...] = (
    idle,
    calls,
    again,
    reread,
    copies,
    waits,
    transfers,
    bandwidth,
    compute,
)


def _removable(cause: str, share: float, told: str) -> Finding:
    bound = 1 / (1 - min(share, 0.99))
    return Finding(cause, share, f"{told}. Without that: at most {times_told(bound)}", bound)


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def times_told(ratio: float) -> str:
    return f"{number(ratio)}×"


def dtype_name(p: Profile) -> str:
    return str(p.work.dtype).removeprefix("torch.")
