"""Diagnose where the time of a decode step goes on this machine: ``print(diagnose(model))``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from rosellm import LLM
from rosellm.environment import environment
from rosellm.lab.diagnose.ceilings import other_load
from rosellm.lab.diagnose.profile import Profile, profile_of
from rosellm.lab.diagnose.rules import Finding, findings, percent
from rosellm.lab.diagnose.steps import EngineSteps, Steps, SubjectError, TransformersSteps
from rosellm.lab.diagnose.trials import WHEN_BUSY, Trial, candidates_for, try_all
from rosellm.lab.records.account import WORKING
from rosellm.lab.records.ledger import MOST_STRETCHED
from rosellm.lab.records.records import number
from rosellm.models.loading import load_parts
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER

ROUGH = 1.5  # slowdown under the profiler above which a step's shares are inexact
EXPLAINED = 0.5  # share of a step that must be explained
MOST_CHARACTERS = 100  # per line
Load = Callable[[], Transformer]


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a decode step; ``str`` returns it as text.

    profile: the step's figures.
    findings: what bounds the step.
    trials: the remedies that were tried.
    undetermined: the questions that remain open, with a way to answer each.
    busy: why times measured on this machine cannot be trusted; "" if they can be.
    """

    profile: Profile
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...]
    undetermined: tuple[str, ...]
    device_name: str
    busy: str = ""

    @property
    def causes(self) -> list[str]:
        """The causes of the findings, in order of decreasing share."""
        return [finding.cause for finding in self.findings]

    def __str__(self) -> str:
        if self.busy:
            return _folded(f"This machine is busy: {self.busy}. No time here can be trusted; {WHEN_BUSY}.")
        lines = _step_told(self)
        lines += [f"* {one.sentence[0].upper()}{one.sentence[1:]}." for one in self.findings]
        if not self.findings:
            lines.append("No rule reaches its threshold.")
        for title, items in (("Tried here:", self.trials), ("Not determined:", self.undetermined)):
            lines += [title, *(f"- {item}" for item in items)] if items else []
        return "\n".join(map(_folded, lines))


def _folded(line: str) -> str:
    return fill(line, MOST_CHARACTERS, subsequent_indent="  ", break_long_words=False)


def diagnose(
    subject: LLM | Engine | Steps | Any,
    *,
    batch: int = 8,
    context: int = 256,
    ours: Load | None = None,
    progress: Callable[[str], object] = lambda stage: None,
) -> Diagnosis:
    """Measure ceilings and decode steps, attribute the steps' time, and benchmark remedies.

    subject: an ``LLM`` or ``Engine`` (a new engine with the same recipe and weights is measured), a causal
        language model of transformers (its ``generate`` is measured), or ``Steps``, such as a ``Loop`` over
        your own code.
    batch: sequences per step; ignored for ``Steps``.
    context: cached tokens per sequence; ignored for ``Steps``.
    ours: loads the checkpoint of a transformers model into our model; None loads it from where transformers
        loaded it.
    progress: called with a description of each stage before the stage starts.

    Prompts are random, with a fixed seed. No remedy is tried for a ``Loop`` (compare it with a modified
    ``Loop``, by ``trials.try_in_turns``) or if the machine is busy at the start. Raises ``SubjectError``,
    ``PromptError`` or ``LedgerError``.
    """
    steps = steps_of(subject, batch, context)
    work, ours = steps.work, ours or _loader_of(subject)
    busy = other_load(work.device)
    progress(f"measuring this machine, then profiling steps of {steps.name}")
    profile = profile_of(steps)
    found = findings(profile)
    candidates = candidates_for(steps, found, ours) if not busy else {}
    if candidates:
        progress(f"trying in turns: {', '.join(candidates)}")
    tried, refused = try_all(steps, candidates)
    if disturbed := [trial.spread for trial in tried if trial.is_disturbed]:
        busy = f"the same steps took up to {number(max(disturbed))} times as long, however often repeated"
    busy = busy or other_load(work.device)
    told = (*_undetermined(steps, profile, found, ours), *(f"{name}: {why}" for name, why in refused.items()))
    return Diagnosis(profile, found, tried, told, environment(work.device)["device_name"], busy)


def steps_of(subject: Any, batch: int, context: int) -> Steps:
    """Return the decode steps of an LLM, an Engine, a causal language model of transformers, or a ``Steps``.

    batch, context: sequences per step, and cached tokens per sequence; ignored for a ``Steps``.

    Raises ``SubjectError`` for any other object or an invalid batch or context, and ``PromptError`` if the
    model has too few positions.
    """
    if isinstance(subject, LLM):
        subject = subject.engine
    if isinstance(subject, Engine):
        is_rung = subject.rung is not None and subject.recipe == LADDER[subject.rung]
        return EngineSteps(subject.model, subject.rung if is_rung else subject.recipe, batch, context)
    if isinstance(subject, Steps):
        return subject
    if callable(getattr(subject, "generate", None)) and hasattr(subject, "generation_config"):
        return TransformersSteps(subject, batch, context)
    raise SubjectError(
        f"{type(subject).__name__} cannot be diagnosed; give an LLM, an Engine, a causal language model of "
        "transformers or a Loop"
    )


def _loader_of(subject: Any) -> Load | None:
    """Return a function that loads the checkpoint of a transformers model; None if it has no checkpoint."""
    folder = getattr(subject, "name_or_path", "")
    if not folder:
        return None
    dtype = str(subject.dtype).removeprefix("torch.")
    return lambda: load_parts(folder, subject.device.type, dtype)[0]


def _step_told(d: Diagnosis) -> list[str]:
    p, work = d.profile, d.profile.work
    cached = "" if work.context is None else f", {number(work.context)} tokens cached a sequence"
    roles = sorted((row for row in p.rows if row.kind in WORKING), key=lambda row: -row.share)[:3]
    shares = ", ".join(f"{row.cause} {percent(row.share)}" for row in roles)
    kv = f" and {number(work.kv_bytes / 1e6)} MB of keys and values" if work.kv_bytes else ""
    floor = f"read {number(work.weight_bytes / 1e6)} MB of weights{kv} once"
    if p.compute_us > p.read_us:
        floor = f"do the arithmetic of its GEMMs for {work.batch} token{'s' * (work.batch > 1)}"
    return [
        f"{p.name}: batch {work.batch}{cached}, {work.dtype_name}, on {d.device_name}.",
        f"This machine {p.ceilings}.",
        f"A step takes {number(p.step_us)} µs, {number(work.batch / p.step_us * 1e6)} tokens a second: "
        f"{number(p.step_us / p.floor_us)} times its floor, the {number(p.floor_us)} µs to {floor}.",
        f"Most of it: {shares}; in {percent(p.idle_share)} nothing runs.",
    ]


def _undetermined(steps: Steps, p: Profile, found: Sequence[Finding], ours: Load | None) -> Iterator[str]:
    """Yield each open question, followed by "; " and a way to answer it."""
    unexplained = 1 - p.floor_us / p.step_us - sum(one.share for one in found if one.bound is not None)
    if unexplained > 1 - EXPLAINED:
        most = max((row for row in p.rows if row.kind in WORKING), key=lambda row: row.share).cause
        yield (
            f"why {percent(unexplained)} of the step, mostly {most}, stays below the ceilings; replace "
            f"{most} in a Loop of your own and compare both with try_in_turns"
        )
    if p.stretched > (MOST_STRETCHED if p.on_gpu else ROUGH):
        yield (
            f"exact shares: under the profiler a step took {number(p.stretched)} times as long; a larger "
            "batch or context has longer operators, which it stretches less"
        )
    if p.work.kv_bytes is None:
        yield "the bytes of keys and values, which the floor leaves out; give the loop its kv_bytes"
    if isinstance(steps, EngineSteps) and not p.on_gpu:
        yield "how this rung does elsewhere: on a CPU its specification in plain torch runs; run this there"
    if isinstance(steps, TransformersSteps):
        yield (
            "what torch.compile gives: compiling takes too long for a trial; compile the model and diagnose "
            "a Loop over it"
        )
        if ours is None:
            yield (
                "what this engine gives: the model was not loaded from a checkpoint; save it with "
                "save_pretrained and load it from there"
            )
