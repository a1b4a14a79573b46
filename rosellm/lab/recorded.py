"""Compare two rungs in the records of the reference machine and of any others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

from rosellm.bench.workloads import WORKLOADS
from rosellm.lab.figures.bars import before_after, waterfall
from rosellm.lab.figures.charts import Chart, say, show, show_table
from rosellm.lab.figures.slider import Control, explore
from rosellm.lab.figures.timeline import timeline
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.machines import LACKING, beside, check_same_size, name_of, names_of, why_lacking
from rosellm.lab.records.recordings import STEPS
from rosellm.lab.records.records import RecordError, Results, find, number, read_us
from rosellm.lab.records.step_time import STEP_WORKLOADS, StepTimes, step_times, steps_of
from rosellm.lab.records.trace import Trace
from rosellm.lab.records.verdicts import WORKLOADS as VERDICTS, Verdict, verdicts
from rosellm.roseinfer.recipe import LADDER

MIXED_LEDGERS = "nvidia-h100-80gb-hbm3"  # the machine with the record ``ledger_w8``
CAUSES = ("attention", "GEMM", "head", "norm", "sampling")
HEADS = ("step", "floor", *CAUSES)

K = TypeVar("K")
T = TypeVar("T")


def _undisturbed(figures: Mapping[str, Any], name: str) -> Ledger:
    ledger = Ledger.from_dict(figures)
    if ledger.is_disturbed:
        raise RecordError(f"the profiler disturbed the ledger of {name}")
    return ledger


def _draw_waterfall(ledgers: Mapping[int, Sequence[Ledger]], batch: int) -> None:
    before, after = ledgers[batch]
    show(waterfall(before, after))


@dataclass(kw_only=True)
class RecordedPair:
    """Two rungs, and their records on one or more machines.

    before, after: the names of the rungs.
    results: the records of the reference machine, on which the notebook's sentences and predictions rest.
    others: the records of other machines. Tables and charts include them, and a line names what they lack.
    predicted: workload → predicted saving in µs per step, set by :meth:`predict`.
    """

    before: str
    after: str
    results: Results
    others: tuple[Results, ...] = ()
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def machines(self) -> list[Results]:
        """The records of the reference machine, then those of the other machines."""
        return [self.results, *self.others]

    @property
    def change(self) -> dict[str, tuple[str, str]]:
        """The fields in which the recipes differ: name → (value before, value after)."""
        return LADDER[self.before].difference(LADDER[self.after])

    def predict(self, **saved_us: float) -> None:
        """Print the predicted savings next to the recorded step times of the rung ``before``.

        saved_us: workload → predicted saving in µs per step, on the reference machine only.
        """
        self.predicted = saved_us

        def figures(results: Results, workload: str) -> list[Any]:
            before, us = self.step_us(workload, results)[0].us, saved_us[workload]
            return [before, us, us / before * 100] if results is self.results else [before, None, None]

        self.print_table(["", "step before, µs", "predicted to save, µs", "%"], saved_us, figures)

    def outcome(self) -> None:
        """Print the recorded savings per step next to the prediction.

        Each rung was measured on several engines: the column "range over engines" is the smallest and the
        largest saving between an engine of one rung and an engine of the other. The last column is the saving
        that whole runs imply, recorded in another session.
        """

        def figures(results: Results, workload: str) -> list[Any]:
            old, new = self.step_us(workload, results)
            least, most = old.range_us[0] - new.range_us[1], old.range_us[1] - new.range_us[0]
            us = self.predicted[workload] if results is self.results else None
            by_runs = None  # if no session ran both rungs
            if workload in self.verdicts(results):
                before, after = self.whole_run_us(workload, results)
                by_runs = before - after
            engines = f"{number(least)} to {number(most)}"
            return [old.us, new.us, us, old.us - new.us, engines, by_runs]

        headers = ["", f"{self.before}, µs", f"{self.after}, µs", "predicted", "saved, µs"]
        headers += ["range over engines", "by whole runs"]
        self.print_table(headers, self.predicted, figures)
        print("range over engines: smallest and largest saving between one engine of each rung, of three")
        print("by whole runs: the saving per step that the tokens per second of whole runs imply")
        workload = next(iter(self.predicted))
        dated = self.results.environment_line
        steps, runs = (dated(name)[-10:] for name in (f"steps-{workload}", f"{workload}-{self.after}"))
        if steps != runs:
            print(f"steps: {steps}; whole runs: {runs}, in another session, perhaps on a faster host")

    def ablation(self) -> None:
        """Print the recorded µs per step of both rungs and of the variants between them, by workload."""

        def steps(results: Results, workload: str) -> dict[str, StepTimes]:
            return step_times(results.figures(f"ablations-{workload}", self.after)["turns_us"])

        def figures(results: Results, name: str) -> list[Any]:
            return [steps(results, workload)[name].us for workload in STEP_WORKLOADS]

        names = steps(self.results, STEP_WORKLOADS[0])
        self.print_table(["µs a step", *STEP_WORKLOADS], names, figures)

    def step_us(self, workload: str, results: Results | None = None) -> tuple[StepTimes, StepTimes]:
        """Return the recorded step times of both rungs at a workload's batch size and mid-run context.

        results: a machine's records, by default the reference machine's.

        Raises RecordError if they are missing, or were measured at another batch size or context than the
        reference machine's.
        """
        if results is not None and results is not self.results:
            check_same_size(results, self.results, f"steps-{workload}")
        old, new = steps_of(results or self.results, workload, self.before, self.after)
        return old, new

    def whole_run_us(self, workload: str, results: Results | None = None) -> tuple[float, float]:
        """Return the µs per decode step that whole runs of both rungs imply.

        They are the workload's batch size divided by the tokens per second.
        """
        rows, found = WORKLOADS[workload].max_batch_size, results or self.results
        before, after = (rows / found.value(workload, rung) * 1e6 for rung in (self.before, self.after))
        return before, after

    def print_table(
        self, headers: Sequence[str], keys: Iterable[K], figures: Callable[[Results, K], list[Any]]
    ) -> None:
        """Print a table with a row for each key and machine, followed by lines that name what machines lack.

        figures: returns the cells of a row after its label, the key.
        """
        rows, lacking = beside(self.machines, keys, figures)
        show_table(headers, rows, *lacking)

    def each_machine(self, read: Callable[[Results], T]) -> Iterator[tuple[str, T]]:
        """Yield the name of each machine and what ``read`` returns for its records.

        A line is printed instead if ``read`` returns nothing or raises RecordError or LookupError. An error
        for the reference machine is raised.
        """
        for results in self.machines:
            found, why = None, RecordError.why
            try:
                found = read(results)
            except LACKING as error:
                if results is self.results:
                    raise
                why = why_lacking(error)
            if found:
                yield name_of(results), found
            else:
                print(f"{why}, {name_of(results)}")

    def timeline(self) -> None:
        """Draw consecutive recorded decode steps of both rungs on one time axis."""
        for name, recorded in self.each_machine(lambda one: one.figures("timelines", self.after)):
            traces = {rung: Trace.from_dict(recorded[rung]) for rung in (self.before, self.after)}
            title = f"{STEPS} decode steps of {recorded['batch']} sequences, profiled, {name}"
            show(timeline(traces, title))

    def waterfall(self, first: int | None = None) -> None:
        """Draw the recorded µs of a decode step of both rungs by cause; omit disturbed ledgers.

        first: the batch size shown first, by default the largest.
        """
        for name, ledgers in self.each_machine(self._ledgers):
            if name != name_of(self.results):
                say(f"**{name}**")
            usable = {n: two for n, two in ledgers.items() if not any(one.is_disturbed for one in two)}
            if not usable:
                say("The profiler disturbed every recorded ledger of these two rungs: no waterfall is drawn.")
            else:
                shown = first if first in usable else max(usable)
                batches = Control("batch, sequences", list(usable), first=shown)
                explore(partial(_draw_waterfall, usable), batch=batches)

    def _ledgers(self, results: Results) -> dict[int, list[Ledger]]:
        """Return batch size → the recorded ledgers of both rungs."""
        return {
            int(batch): [Ledger.from_dict(rungs[rung]) for rung in (self.before, self.after)]
            for batch, rungs in results.figures("ledger").items()
        }

    def ledger(self, batch: int) -> Ledger:
        """Return the reference machine's ledger of the rung ``after``, as :meth:`ledger_on` does."""
        return self.ledger_on(self.results, self.after, batch)

    def ledger_before(self, batch: int) -> Ledger:
        """Return the reference machine's ledger of the rung ``before``, as :meth:`ledger_on` does."""
        return self.ledger_on(self.results, self.before, batch)

    def ledger_on(self, results: Results, rung: str, batch: int) -> Ledger:
        """Return the recorded ledger of a rung's decode step on one of the machines.

        Raises RecordError if it is missing, or if the profiler disturbed it.
        """
        return _undisturbed(results.figures("ledger", str(batch), rung), f"{rung} at batch {batch}")

    def mixed_ledgers(self) -> dict[str, Ledger]:
        """Print where a decode step of W8, W9 and W10 spends its time, and return workload → ledger.

        Every sequence is halfway through its output. The ledgers returned are those of ``MIXED_LEDGERS``; the
        table also shows those of ``others``.
        """
        first = find(MIXED_LEDGERS)
        others = tuple(replace(one, like=first) for one in self.others if one.folder != first.folder)

        def figures(results: Results, workload: str) -> list[Any]:
            ledger = _undisturbed(results.figures("ledger_w8", workload), workload)
            return [ledger.step_us, ledger.floor_us, *map(ledger.us_by_cause().get, CAUSES)]

        recorded, label = first.figures("ledger_w8"), "µs" if others else f"{name_of(first)}, µs"
        replace(self, results=first, others=others).print_table([label, *HEADS], recorded, figures)
        return {workload: Ledger.from_dict(one) for workload, one in recorded.items()}

    def read_us(self, n_bytes: float, results: Results | None = None) -> float:
        """Return the µs to read ``n_bytes`` at a machine's read bandwidth.

        results: the machine's records, by default the reference machine's.
        """
        return read_us(results or self.results, n_bytes)

    def recorded(self, *others: RecordedPair) -> None:
        """Draw the recorded tokens per second of whole runs of both rungs.

        others: further pairs; a slider then chooses the pair by its rung ``after``.
        """
        pairs = {pair.after: (pair, pair.with_whole_runs()) for pair in (self, *others)}
        charts = {rung: pair.whole_runs_chart(shown) for rung, (pair, shown) in pairs.items() if shown}
        if len(charts) > 1:
            explore(lambda rung: show(charts[rung]), rung=Control("rung", list(charts)))
        elif charts:
            show(*charts.values())
        ran = [(pair, results) for pair, shown in pairs.values() for results in shown]
        lines = [one.environment_line(f"{next(iter(pair.verdicts(one)))}-{pair.after}") for pair, one in ran]
        for line in dict.fromkeys(lines):
            print(line)

    def with_whole_runs(self) -> list[Results]:
        """Return the machines on which one session ran both rungs; name the others in a line each."""
        shown = []
        for results in self.machines:
            measured = self._measured(results)
            if any(one.same_session for one in measured):
                shown.append(results)
                continue
            why = "were not recorded together" if measured else "have no records yet"
            say(f"`{self.before}` and `{self.after}` {why} on {name_of(results)}.")
        return shown

    def whole_runs_chart(self, machines: Sequence[Results]) -> Chart:
        """Return a chart of the medians by workload, with the machines of a workload side by side."""
        each = list(zip(names_of(machines), map(self.verdicts, machines), strict=True))
        found = {f"{w}{name}": own[w] for w in VERDICTS for name, own in each if w in own}
        chart = before_after(
            [*found],
            [median(one.before) for one in found.values()],
            [median(one.after) for one in found.values()],
            ["tok/s"] * len(found),
            (self.before, self.after),
            title=f"{self.before} → {self.after} on {' and '.join(map(name_of, machines))}: "
            "tokens per second of the whole run",
        )
        legend = [f"{one.workload}: {WORKLOADS[one.workload].described}" for one in found.values()]
        return chart.update_traces(hovertext=legend, hoverinfo="name+text")

    def verdicts(self, results: Results | None = None) -> dict[str, Verdict]:
        """Return workload → verdict, for the workloads on which both rungs were recorded in one session.

        results: a machine's records, by default the reference machine's.
        """
        measured = self._measured(results or self.results)
        return {one.workload: one for one in measured if one.same_session}

    def _measured(self, results: Results) -> list[Verdict]:
        return [one for one in verdicts(results, self.before, self.after) if one.is_measured]

    def verdict(self) -> None:
        """Print by workload the tokens per second of both rungs, their change, its spread, and the verdict.

        Lines name the workloads whose rungs were recorded in different sessions and are not compared.
        """
        recorded = {results: self.verdicts(results) for results in self.machines}

        def figures(results: Results, workload: str) -> list[Any]:
            one = recorded[results][workload]
            spread = f"{one.spread / median(one.before):.1%}"
            return [median(one.before), median(one.after), one.change, spread, one.word]

        headers = ["", f"{self.before}, tok/s", f"{self.after}, tok/s", "change", "spread", "verdict"]
        workloads = recorded[self.results] or next(filter(None, recorded.values()), {})
        if workloads:
            self.print_table(headers, workloads, figures)
            print("spread: the larger range of the two rungs' repeats, in % of the first rung's median")
            print("A change counts if it is more than twice the spread and the repeats do not overlap.")
        for results in self.machines:
            apart = [one.workload for one in self._measured(results) if not one.same_session]
            if apart:
                print(f"{' '.join(apart)}: recorded in different sessions, so not compared")

    def gain(self, workload: str) -> float:
        """Return the gain of whole runs on the reference machine: 0.5 means 50 % more tokens per second.

        Raises KeyError unless both rungs were recorded in one session.
        """
        return self.verdicts()[workload].ratio - 1
