"""Rules for what bounds a step: a cause, how it shows in a profile, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rosellm.lab.diagnose.profile import Profile
from rosellm.lab.records.records import number

GPU, CPU, BOTH = (True,), (False,), (True, False)


class Rule(NamedTuple):
    """A cause that is found on the devices ``on`` from a share ``least`` of the step.

    share: the profile's attribute; 0 if the cause is absent. cures: recipe fields that remove the cause.
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
CEILINGS = ("bandwidth", "compute")  # causes that nothing removes
SENTENCES = {
    "launch": "launch-bound: the GPU idles {idle} of a step while the host makes {calls} launches, each of "
    "which takes it {call_us} µs or more",
    "Python": "Python: in {idle} of a step no operator runs{slowest}",
    "calls": "call-bound: a step calls {calls} operators; at {call_us} µs each, however small their tensors, "
    "that is {called} of it: fewer and larger ones help",
    "again": "computes the past again: {times} times the operations of one new token a sequence; a KV cache "
    "keeps the rest",
    "reread": "reads weights again: {products} products a step for {matrices} matrices; one forward for all "
    "sequences reads them once",
    "copies": "copies: operators that only move data take {copied} of a step, `{copying}` most of it; a step "
    "makes {allocated} MB of new tensors{cached}: write and read in place",
    "waits": "waits: {waits} times a step {waiting}, which takes {waited} of it",
    "transfers": "transfers: in {transferred} of a step the GPU only copies; keep inputs on it",
    "bandwidth": "bandwidth-bound: reads {read} of what this machine sustains, {read_mb} MB a step; what is "
    "left is fewer bytes a token ({narrower}keys that heads share, a larger batch)",
    "compute": "compute-bound: multiplies at {computed} of what this machine sustains in {dtype}; a larger "
    "batch gives no more tokens a second",
}


@dataclass(frozen=True)
class Finding:
    """A rule's cause and cures, the share of the step that the cause takes, and a sentence.

    bound: the largest speedup in tokens per second from removing the cause; None for a ceiling, where only
    less work helps.
    """

    cause: str
    share: float
    sentence: str
    bound: float | None = None
    cures: tuple[str, ...] = ()


def findings(p: Profile) -> tuple[Finding, ...]:
    """Return the findings for a step, largest share first."""
    found, figures = [], _figures(p)
    for cause, on, attribute, least, cures in RULES:
        share = getattr(p, attribute)
        if p.on_gpu not in on or share < least:
            continue
        bound = None if cause in CEILINGS else 1 / (1 - min(share, 0.99))
        without = f". Without that: at most {number(bound)}×" if bound else ""
        found.append(Finding(cause, share, SENTENCES[cause].format(**figures) + without, bound, cures))
    return tuple(sorted(found, key=lambda finding: -finding.share))


def _figures(p: Profile) -> dict[str, str]:
    """Return the figures in ``SENTENCES``, formatted."""
    work = p.work
    functions = [function for function in p.functions if function.is_one]
    most = max(functions, key=lambda function: function.us, default=None)
    cached = f", {number(work.kv_bytes / 1e6)} MB of keys and values are cached" if work.kv_bytes else ""
    pageable = "the host waits for the GPU (`.item()`, copies to or from pageable memory)"
    return {
        "idle": percent(p.idle_share),
        "slowest": f"; the function that takes most of the host's time is {most.name}" if most else "",
        "calls": number(p.calls),
        "call_us": number(p.ceilings.call_us),
        "called": percent(p.calls_share),
        "times": number(p.times_computed),
        "products": number(p.products),
        "matrices": str(work.n_matrices),
        "copied": percent(p.copied_share),
        "copying": p.copying,
        "allocated": number(p.allocated / 1e6),
        "cached": cached,
        "waits": number(p.waits),
        "waiting": pageable if p.on_gpu else "`.item()` reads a number",
        "waited": percent(p.waits_share),
        "transferred": percent(p.transfer_share),
        "read": percent(min(p.read_us / p.step_us, 1)),
        "read_mb": number(work.read_bytes / 1e6),
        "narrower": "16-bit weights, " if work.dtype.itemsize > 2 else "",
        "computed": percent(min(p.compute_us / p.step_us, 1)),
        "dtype": work.dtype_name,
    }


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
