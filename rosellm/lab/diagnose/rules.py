"""Find what bounds a decode step, by rules: each has a cause, its threshold, and its remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rosellm.lab.diagnose.profile import Profile
from rosellm.lab.records.records import number

GPU, CPU, BOTH = (True,), (False,), (True, False)


class Rule(NamedTuple):
    """A rule that finds a cause if its share of the step is at least ``least``.

    on: the devices that the rule applies to: True for a GPU, False for a CPU.
    share: name of the attribute of ``Profile`` that is the cause's share; it is 0 if the cause is absent.
    cures: recipe fields that can remove the cause.
    """

    cause: str
    on: tuple[bool, ...]
    share: str
    least: float
    cures: tuple[str, ...] = ()


RULES = (
    Rule("launch", GPU, "idle_share", 0.25, ("runner", "indices", "step", "norm")),
    Rule("Python", CPU, "idle_share", 0.25, ("block_info", "pool", "step")),
    Rule("calls", CPU, "calls_share", 0.3, ("mask", "pool", "step", "norm")),
    Rule("again", BOTH, "again_share", 0.01),
    Rule("reread", BOTH, "reread_share", 0.01),
    Rule("copies", GPU, "copied_share", 0.1, ("attention", "append")),
    Rule("copies", CPU, "copied_share", 0.1, ("attention", "step")),
    Rule("waits", BOTH, "waits_share", 0.1, ("indices", "step")),
    Rule("transfers", GPU, "transfer_share", 0.1, ("tables", "step")),
    Rule("bandwidth", BOTH, "read_share", 0.4, ("attention",)),
    Rule("compute", BOTH, "compute_share", 0.4),
)
CEILINGS = ("bandwidth", "compute")  # limits of the machine: no change of the program removes them


@dataclass(frozen=True)
class Finding:
    """A cause that a rule found in a profile.

    share: share of the step that the cause takes.
    sentence: how the cause shows in the profile.
    bound: maximum speedup in tokens per second from removing the cause; None for a ceiling, where only less
        work helps.
    cures: recipe fields that can remove the cause.
    """

    cause: str
    share: float
    sentence: str
    bound: float | None = None
    cures: tuple[str, ...] = ()


def findings(p: Profile) -> tuple[Finding, ...]:
    """Return the findings of all rules for a profile, in order of decreasing share."""
    found, told = [], _sentences(p)
    for cause, on, attribute, least, cures in RULES:
        share = getattr(p, attribute)
        if p.on_gpu not in on or share < least:
            continue
        bound = None if cause in CEILINGS else 1 / (1 - min(share, 0.99))
        without = f". Removing it gives at most {number(bound)}×" if bound else ""
        found.append(Finding(cause, share, told[cause] + without, bound, cures))
    return tuple(sorted(found, key=lambda finding: -finding.share))


def _sentences(p: Profile) -> dict[str, str]:
    """Return, by cause, a sentence on how the cause shows in this profile."""
    work, call_us = p.work, number(p.ceilings.call_us)
    functions = [function for function in p.functions if function.is_one]
    most = max(functions, key=lambda function: function.us, default=None)
    slowest = f"; the function that takes most of the host's time is {most.name}" if most else ""
    cached = f", {number(work.kv_bytes / 1e6)} MB of keys and values are cached" if work.kv_bytes else ""
    waiting = "the host waits for the GPU (`.item()`, copies to or from pageable memory)"
    narrower = "16-bit weights, " if work.dtype.itemsize > 2 else ""
    return {
        "launch": f"launch-bound: the GPU idles {percent(p.idle_share)} of a step while the host makes "
        f"{number(p.calls)} launches, each of which takes it {call_us} µs or more",
        "Python": f"Python: in {percent(p.idle_share)} of a step no operator runs{slowest}",
        "calls": f"call-bound: a step calls {number(p.calls)} operators; at {call_us} µs each, however small "
        f"their tensors, that is {percent(p.calls_share)} of it: fewer and larger ones help",
        "again": f"computes the past again: {number(p.times_computed)} times the operations of one new token "
        "a sequence; a KV cache keeps the rest",
        "reread": f"reads weights again: {number(p.products)} products a step for {work.n_matrices} "
        "matrices; one forward for all sequences reads them once",
        "copies": f"copies: operators that only move data take {percent(p.copied_share)} of a step, "
        f"`{p.copying}` most of it; a step makes {number(p.allocated / 1e6)} MB of new tensors{cached}: "
        "write and read in place",
        "waits": f"waits: {number(p.waits)} times a step "
        f"{waiting if p.on_gpu else '`.item()` reads a number'}, which takes {percent(p.waits_share)} of it",
        "transfers": f"transfers: in {percent(p.transfer_share)} of a step the GPU only copies; keep inputs "
        "on it",
        "bandwidth": f"bandwidth-bound: reads {percent(min(p.read_us / p.step_us, 1))} of what this machine "
        f"sustains, {number(work.read_bytes / 1e6)} MB a step; what is left is fewer bytes a token "
        f"({narrower}keys that heads share, a larger batch)",
        "compute": f"compute-bound: multiplies at {percent(min(p.compute_us / p.step_us, 1))} of what this "
        f"machine sustains in {work.dtype_name}; a larger batch gives no more tokens a second",
    }


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
