"""Where the time of a decode step goes on this machine: ``print(diagnose(model))``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any

from rosellm import LLM
from rosellm.environment import environment
from rosellm.lab.diagnose.ceilings import Ceilings, find_ceilings, gpu_in_use, overload
from rosellm.lab.diagnose.profile import Profile, profile_of
from rosellm.lab.diagnose.rules import Finding, dtype_name, findings, percent
from rosellm.lab.diagnose.steps import EngineSteps, Steps, SubjectError, TransformersSteps
from rosellm.lab.diagnose.trials import (
    MOST_SPREAD,
    WHEN_BUSY,
    Make,
    Trial,
    engine_candidates,
    transformers_candidates,
    try_all,
    undisturbed,
)
from rosellm.lab.records.account import WORKING
from rosellm.lab.records.ledger import MOST_STRETCHED
from rosellm.lab.records.records import number
from rosellm.models.loading import load_parts
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER

ROUGH = 1.5  # slowdown under the profiler from which a step's shares are rough
EXPLAINED = 0.5  # share of a step
MOST_CHARACTERS = 100  # a line


@dataclass(frozen=True)
class Diagnosis:
    """A step's figures, what bounds it, the remedies tried, and what is undetermined; prints as text."""

    profile: Profile
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...]
    undetermined: tuple[str, ...]
    device_name: str
    busy: str = ""  # why times on this machine cannot be trusted

    @property
    def causes(self) -> list[str]:
        """Short names of the findings, largest first."""
        return [finding.cause for finding in self.findings]

    def __str__(self) -> str:
        if self.busy:
            return _folded(f"This machine is busy: {self.busy}. No time here can be trusted; {WHEN_BUSY}.")
        parts = [_step_told(self), *map(_sentence, self.findings)]
        if not self.findings:
            parts.append("No rule reaches its threshold.")
        for title, lines in (("Tried here:", self.trials), ("Not determined:", self.undetermined)):
            if lines:
                parts += [title, *(f"- {line}" for line in lines)]
        return "\n".join(map(_folded, "\n".join(parts).splitlines()))


def _folded(line: str) -> str:
    """Wrap a line to the width of a notebook page."""
    return "\n".join(wrap(line, MOST_CHARACTERS, subsequent_indent="  ", break_long_words=False))


def diagnose(
    subject: LLM | Engine | Steps | Any, *, batch: int = 8, context: int = 256, trials: bool = True
) -> Diagnosis:
    """Measure ceilings and decode steps, attribute the steps' time, and benchmark remedies.

    subject: an ``LLM`` or ``Engine`` (a fresh engine of its recipe shares its weights), a causal language
    model of transformers (its own ``generate`` is run), or a ``Loop`` over your own code. batch: sequences
    per step, and context: cached tokens per sequence, both with seeded random prompts; a ``Loop`` brings its
    own. trials: False to try no remedies. Nothing is tried for a ``Loop``: compare it with a modified one
    (``trials.try_in_turns``). Raises ``SubjectError``, ``PromptError`` or ``LedgerError``.
    """
    return diagnose_steps(steps_of(subject, batch, context), _loader_of(subject), trials)


def diagnose_steps(
    steps: Steps,
    ours: Callable[[], Transformer] | None = None,
    trials: bool = True,
    progress: Callable[[str], object] = lambda _: None,
) -> Diagnosis:
    """Diagnose existing steps; see ``diagnose``.

    ours: loads the checkpoint of transformers' steps into our model. progress: called with a description of
    each stage before it starts. If the machine is busy at the start, no remedy is tried.
    """
    work = steps.work
    busy = overload() or gpu_in_use(work.device)
    progress(f"measuring this machine, then profiling steps of {steps.name}")
    profile = profile_of(steps)
    found = findings(profile)
    candidates = _candidates(steps, found, ours) if trials and not busy else {}
    if candidates:
        progress(f"trying in turns: {', '.join(candidates)}")
    tried, refused = try_all(steps, candidates)
    again = undisturbed(
        partial(find_ceilings, work.device, work.dtype, work.read_bytes),
        partial(_difference, profile.ceilings),
    )
    busy = busy or _why_busy(profile.ceilings, again, tried) or gpu_in_use(work.device)
    told = (*_undetermined(steps, profile, found, ours), *(f"{name}: {why}" for name, why in refused.items()))
    device_name = environment(work.device)["device_name"]
    return Diagnosis(profile, found, tried, told, device_name, busy)


def _why_busy(before: Ceilings, after: Ceilings, tried: tuple[Trial, ...]) -> str:
    """Describe the evidence that other work ran during the measurement, or return ""."""
    if disturbed := [trial.spread for trial in tried if trial.is_disturbed]:
        return f"the same steps took up to {number(max(disturbed))} times as long, however often repeated"
    return _difference(before, after)


def _difference(before: Ceilings, after: Ceilings) -> str:
    """Describe a large difference between two measurements of the ceilings, or return ""."""
    pairs = (
        ("reads", before.read_bytes_per_us, after.read_bytes_per_us),
        ("multiplies", before.flops_per_us, after.flops_per_us),
    )
    for name, one, other in pairs:
        if max(one, other) > MOST_SPREAD * min(one, other):
            times = number(max(one, other) / min(one, other))
            return f"it {name} {times} times as fast at one moment as at another"
    return ""


def steps_of(subject: Any, batch: int, context: int) -> Steps:
    """Return the decode steps of any supported subject. Raises ``SubjectError`` for other objects."""
    if isinstance(subject, LLM):
        subject = subject.engine
    if isinstance(subject, Engine):
        is_rung = subject.rung is not None and subject.recipe == LADDER[subject.rung]
        return EngineSteps(subject.model, subject.rung if is_rung else subject.recipe, batch, context)
    if callable(getattr(subject, "run", None)) and hasattr(subject, "work"):
        return subject
    if callable(getattr(subject, "generate", None)) and hasattr(subject, "generation_config"):
        return TransformersSteps(subject, batch, context)
    raise SubjectError(
        f"{type(subject).__name__} cannot be diagnosed; give an LLM, an Engine, a causal language model of "
        "transformers or a Loop"
    )


def _loader_of(subject: Any) -> Callable[[], Transformer] | None:
    """Return a loader of the checkpoint that a transformers model came from, or None if it came from none."""
    folder = getattr(subject, "name_or_path", "")
    if not folder:
        return None
    dtype = str(subject.dtype).removeprefix("torch.")
    return lambda: load_parts(folder, subject.device.type, dtype)[0]


def _candidates(
    steps: Steps, found: tuple[Finding, ...], ours: Callable[[], Transformer] | None
) -> Mapping[str, Make]:
    if isinstance(steps, EngineSteps):
        return engine_candidates(steps, [finding.cause for finding in found])
    return transformers_candidates(steps, ours) if isinstance(steps, TransformersSteps) else {}


def _step_told(d: Diagnosis) -> str:
    p, work = d.profile, d.profile.work
    cached = "" if work.context is None else f", {number(work.context)} tokens cached a sequence"
    roles = sorted((row for row in p.rows if row.kind in WORKING), key=lambda row: -row.share)[:3]
    shares = ", ".join(f"{row.cause} {percent(row.share)}" for row in roles)
    return "\n".join(
        [
            f"{p.name}: batch {work.batch}{cached}, {dtype_name(p)}, on {d.device_name}.",
            f"This machine {p.ceilings}.",
            f"A step takes {number(p.step_us)} µs, {number(p.tokens_per_s)} tokens a second: "
            f"{number(p.step_us / p.floor_us)} times its floor, the {number(p.floor_us)} µs to "
            f"{_floor_told(p)}.",
            f"Most of it: {shares}; in {percent(p.idle_share)} nothing runs.",
        ]
    )


def _floor_told(p: Profile) -> str:
    if p.compute_us > p.read_us:
        tokens = "1 token" if p.work.batch == 1 else f"{p.work.batch} tokens"
        return f"do the arithmetic of its GEMMs for {tokens}"
    kv = f" and {number(p.work.kv_bytes / 1e6)} MB of keys and values" if p.work.kv_bytes else ""
    return f"read {number(p.work.weight_bytes / 1e6)} MB of weights{kv} once"


def _sentence(finding: Finding) -> str:
    return f"* {finding.sentence[0].upper()}{finding.sentence[1:]}."


def _undetermined(
    steps: Steps, p: Profile, found: tuple[Finding, ...], ours: Callable[[], Transformer] | None
) -> list[str]:
    """List what remains open, each followed by "; " and how to find out."""
    told = []
    explained = p.floor_us / p.step_us + sum(one.share for one in found if one.bound is not None)
    if explained < EXPLAINED:
        most = max((row for row in p.rows if row.kind in WORKING), key=lambda row: row.share)
        told.append(
            f"why {percent(1 - explained)} of the step, {most.cause} most of it, stays below the ceilings; "
            f"exchange what does {most.cause} in a Loop of your own and run both with try_in_turns"
        )
    if p.stretched > (MOST_STRETCHED if p.on_gpu else ROUGH):
        told.append(
            f"exact shares: under the profiler a step took {number(p.stretched)} times as long; a larger "
            "batch or context has longer operators, which it stretches less"
        )
    if p.work.kv_bytes is None:
        told.append("the bytes of keys and values, which the floor leaves out; give the loop its kv_bytes")
    if isinstance(steps, EngineSteps) and not p.on_gpu:
        told.append(
            "how this rung does elsewhere: on a CPU its specification in plain torch runs; run this there"
        )
    if isinstance(steps, TransformersSteps):
        told.append(
            "what torch.compile gives: it compiles for minutes, too long for a trial; compile the model and "
            "diagnose a Loop over it"
        )
        if ours is None:
            told.append(
                "what this engine gives: the model was not loaded from a checkpoint; save it with "
                "save_pretrained and load it from there"
            )
    return told
