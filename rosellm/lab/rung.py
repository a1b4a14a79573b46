"""What every notebook of a rung shows, each in one call: ``nb = open_rung("cuda_graph", batch=6)``.

A rung is told against the one before it: the change in the recipe, the figure of the data flow, both
sources, a prediction, a run of both here, proof of equal tokens, and the records of a named GPU.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from IPython.display import display

from rosellm.errors import RecipeError, RoseError
from rosellm.lab.figures import compare as pair
from rosellm.lab.figures.charts import show, text_table
from rosellm.lab.figures.compare import say
from rosellm.lab.figures.flow import flow
from rosellm.lab.figures.ledger import waterfall
from rosellm.lab.figures.source import show_pair, show_source
from rosellm.lab.figures.timeline import timeline
from rosellm.lab.figures.widgets import Control, explore
from rosellm.lab.records.bench import Bench, Run, compare, get_model, make_prompts
from rosellm.lab.records.experiments import equality
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.parameters import check_parameters
from rosellm.lab.records.records import RecordError, Results, find, number, read_us, results_folder
from rosellm.lab.records.step_records import STEP_WORKLOADS
from rosellm.lab.records.step_time import StepTimes, recorded_steps, step_times
from rosellm.lab.records.timelines import STEPS
from rosellm.lab.records.trace import Trace
from rosellm.lab.records.verdicts import Verdict, verdicts
from rosellm.models.model import Transformer
from rosellm.roseinfer.bench.workloads import WORKLOADS
from rosellm.roseinfer.recipe import BEFORE, LADDER, get_rung

CLOSEST_CALL = 1e-3  # of two logits in fp32: below that, the order of a sum may decide


class ClaimError(RoseError, AssertionError):
    """A sentence that the figures no longer bear out."""


@dataclass
class Rung:
    """A rung, the one before it, and what a notebook's parameters made: model, prompts, records."""

    before: str
    after: str
    gpt: Transformer
    exact: Callable[[], Transformer]  # the same model in fp32
    prompt_lengths: list[int]
    batch: int
    new_tokens: int
    results: Results
    runs: tuple[Run, Run] | None = None
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        """Seeded random token ids, ``batch`` prompts."""
        return make_prompts(self.batch, self.prompt_lengths, self.gpt.config.vocab_size)

    @property
    def change(self) -> dict[str, tuple[str, str]]:
        """The recipe's fields that differ: name → (before, after)."""
        return LADDER[self.before].difference(LADDER[self.after])

    @property
    def refusal(self) -> str:
        """Why one of the two rungs cannot run this model; empty if both can."""
        for rung in (self.before, self.after):
            try:
                LADDER[rung].check_serves(self.gpt.config)
            except RecipeError as error:
                return str(error)
        return ""

    def flow(self, name: str | None = None) -> None:
        """The figure of the data flow: ``notebooks/flows/NAME.toml``, by default the rung's."""
        path = results_folder().parent / "flows" / f"{name or self.after}.toml"
        if not path.is_file():
            raise RecordError(f"there is no figure flows/{path.name} beside the notebooks")
        drawn = tomllib.loads(path.read_text(encoding="utf-8"))
        display(flow(drawn["lanes"], [tuple(arrow) for arrow in drawn["arrows"]], drawn["title"]))

    def source(self, *objects: Any, only: tuple[str, ...] = ()) -> None:
        """The package's source of functions, kernels, or the members ``only`` of classes."""
        show_source(*objects, only=only)

    def sources(self, before: Any, after: Any) -> None:
        """Two sources side by side."""
        show_pair(before, after)

    def predict(self, **saved_us: float) -> None:
        """By workload, the µs a step that the change should save, beside the recorded step before it."""
        self.predicted = saved_us
        rows = []
        for workload, us in saved_us.items():
            before = self.step_us(workload)[0].us
            rows.append([workload, before, us, us / before * 100])
        print(text_table(["", "step before, µs", "predicted to save, µs", "%"], rows))

    def outcome(self) -> None:
        """What the recorded steps really saved, beside the prediction.

        Also the saving that single engines show, from the least favourable pair to the most, and the one that
        the whole runs imply, which another session recorded.
        """
        rows = []
        for workload, us in self.predicted.items():
            old, new = self.step_us(workload)
            least, most = old.range_us[0] - new.range_us[1], old.range_us[1] - new.range_us[0]
            engines = f"{number(least)} to {number(most)}"
            before, after = self.whole_run_us(workload)
            rows.append([workload, old.us, new.us, us, old.us - new.us, engines, before - after])
        headers = ["", f"{self.before}, µs", f"{self.after}, µs", "predicted", "saved, µs", "single engines"]
        print(text_table([*headers, "by whole runs"], rows))
        print("single engines: the least and the most that an engine of each shows")
        steps, runs = (self.results.environment_line(name)[-10:] for name in self._sessions())
        if steps != runs:
            print(f"steps: {steps}; whole runs: {runs}, in another session, perhaps on a faster host")

    def ablation(self) -> None:
        """Recorded µs a step of the rung before, of what lies between, and of this rung, by workload."""
        figures = {w: self.results.load(f"ablations-{w}")["figures"][self.after] for w in STEP_WORKLOADS}
        steps = {w: step_times(one["turns_us"]) for w, one in figures.items()}
        names = list(steps[STEP_WORKLOADS[0]])
        rows = [[name, *(steps[w][name].us for w in STEP_WORKLOADS)] for name in names]
        print(text_table(["µs a step", *STEP_WORKLOADS], rows))

    def step_us(self, workload: str) -> tuple[StepTimes, StepTimes]:
        """The recorded decode steps of both rungs at a workload's batch size and mid-run context."""
        steps = recorded_steps(self.results, workload)
        return steps[self.before], steps[self.after]

    def whole_run_us(self, workload: str) -> tuple[float, float]:
        """µs per decode step that the whole runs of both rungs imply: batch over tokens per second."""
        batch = WORKLOADS[workload].max_batch_size
        one, other = (batch / self.results.value(workload, rung) * 1e6 for rung in (self.before, self.after))
        return one, other

    def _sessions(self) -> tuple[str, str]:
        """The records of a step and of a whole run, by name."""
        workload = next(iter(self.predicted))
        return f"steps-{workload}", f"{workload}-{self.after}"

    def bench(self, batch: int, prompt_length: int, new_tokens: int, **options: Any) -> Bench:
        """Sequences of this rung that are prefilled and ready to decode; options as for ``Bench``."""
        prompts = make_prompts(batch, prompt_length, self.gpt.config.vocab_size)
        return Bench(self.gpt, self.after, prompts, new_tokens, **options)

    @staticmethod
    def poison_free_blocks(bench: Bench) -> None:
        """Fill every KV block that nobody holds with NaN."""
        blocks, n = bench.engine.blocks, bench.engine.num_kv_blocks
        with torch.inference_mode():
            for layer, pool in enumerate(blocks.pool_of):
                free = [i for i in range(n) if not blocks.ref_count(pool * n + i)]
                blocks.k_cache[layer, free] = blocks.v_cache[layer, free] = float("nan")

    def compare(self) -> None:
        """Run both here on the same prompts: work, copies and allocations a step; on a GPU also its time.

        One line instead if a rung cannot run the model.
        """
        if self.refusal:
            print(self.refusal)
            return
        self.runs = compare(self.gpt, self.before, self.after, self.prompts, self.new_tokens)
        if self.gpt.device.type == "cuda":
            show(pair.live_chart(*self.runs, f"One decode step of {self.batch} sequences here"))
        else:
            print(text_table(["a step", self.before, self.after], _counted(*self.runs)))

    def timeline(self) -> None:
        """Consecutive recorded decode steps of both rungs on one time axis: what ran, and who waited."""
        recorded = self.results.load("timelines")["figures"][self.after]
        old, new = (Trace.from_dict(recorded[name]) for name in (self.before, self.after))
        title = f"{STEPS} decode steps of {recorded['batch']} sequences, profiled, {self.results.device_name}"
        show(timeline(old, new, (self.before, self.after), title))

    def tokens_equal(self) -> None:
        """Both rungs' tokens, here in fp32 and as recorded on the GPU. Raises ClaimError."""
        print(self.refusal or self._tokens_equal_here())
        recorded = {
            kind: figures
            for kind, figures in self.results.load("equality")["figures"].items()
            if self.after in figures
        }
        rows = [
            [
                kind,
                f"{figures[self.after]['share_of_tokens_equal']:.1%}",
                figures[self.after]["max_logit_difference"],
            ]
            for kind, figures in recorded.items()
        ]
        print(text_table(["recorded", "tokens equal to dense", "logits at most apart"], rows))

    def _tokens_equal_here(self) -> str:
        few = min(self.batch, 3), min(self.new_tokens, 8)
        one = equality(self.exact(), [self.before, self.after], self.prompt_lengths, *few)[self.after]
        if not one["tokens_equal"] and one["smallest_gap_of_reference"] >= CLOSEST_CALL:
            raise ClaimError(f"{self.after} gives other tokens than {self.before} in fp32")
        return f"fp32, here: {self.before} and {self.after} generate the same tokens"

    def waterfall(self) -> None:
        """Where the recorded µs of a step went, by cause; without ledgers that the profiler disturbed."""
        ledgers = {
            int(batch): [Ledger.from_dict(rungs[rung]) for rung in (self.before, self.after)]
            for batch, rungs in self.results.load("ledger")["figures"].items()
        }
        usable = {batch: two for batch, two in ledgers.items() if not any(one.is_disturbed for one in two)}
        if not usable:
            say("The profiler disturbed every recorded ledger of these two rungs: no waterfall is drawn.")
            return

        def draw(batch: int) -> None:
            before, after = usable[batch]
            show(waterfall(before, after))

        if len(usable) == 1:
            draw(*usable)
        else:
            explore(draw, batch=Control("batch, sequences", list(usable), first=max(usable)))

    def ledger(self, batch: int) -> Ledger:
        """The recorded ledger of this rung's step. Raises RecordError."""
        return self._ledger(self.after, batch)

    def ledger_before(self, batch: int) -> Ledger:
        """The recorded ledger of the step of the rung before. Raises RecordError."""
        return self._ledger(self.before, batch)

    def _ledger(self, rung: str, batch: int) -> Ledger:
        """Refuses one that the profiler disturbed: nothing may be computed from it."""
        recorded = self.results.load("ledger")["figures"]
        if str(batch) not in recorded or rung not in recorded[str(batch)]:
            raise RecordError(f"no ledger of {rung} at batch {batch} was recorded; try {', '.join(recorded)}")
        ledger = Ledger.from_dict(recorded[str(batch)][rung])
        if ledger.is_disturbed:
            raise RecordError(f"the profiler disturbed the ledger of {rung} at batch {batch}")
        return ledger

    def read_us(self, n_bytes: float) -> float:
        """µs to read so many bytes at the recorded GPU's read bandwidth."""
        return read_us(self.results, n_bytes)

    def recorded(self) -> None:
        """Whole-run tokens per second of both rungs on the recorded GPU."""
        if not self.verdicts():
            say(f"`{self.before}` and `{self.after}` have no records of {self.results.device_name} yet.")
            return
        show(pair.recorded_chart(self.results, self.before, self.after))
        print(self.results.environment_line(f"{next(iter(self.verdicts()))}-{self.after}"))

    def verdicts(self) -> dict[str, Verdict]:
        """Workload → what the records allow to be said of it."""
        return {
            one.workload: one for one in verdicts(self.results, self.before, self.after) if one.is_measured
        }

    def verdict(self) -> None:
        """By workload: tokens per second before and after, the least change that counts, the verdict."""
        rows = [
            [one.workload, median(one.before), median(one.after), one.change, f"{one.noise:.1%}", one.word]
            for one in self.verdicts().values()
        ]
        headers = ["", f"{self.before}, tok/s", f"{self.after}, tok/s", "change", "counts from", "verdict"]
        print(text_table(headers, rows))

    def gain(self, workload: str) -> float:
        """The recorded whole-run gain: 0.5 is half as many tokens per second again."""
        return self.verdicts()[workload].ratio - 1

    def conclude(self, sentence: str, *claims: bool) -> None:
        """Display a sentence written by hand. Raises ClaimError if a claim that it rests on does not hold."""
        if not all(claims) or not claims:
            held = [i for i, claim in enumerate(claims, 1) if not claim] or "no claim was given"
            raise ClaimError(f"no longer borne out (claim {held}): {sentence}")
        say(sentence)


def open_rung(
    rung: str,
    before: str | None = None,
    *,
    model: str = "rose-tiny",
    load_format: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    batch: int = 6,
    prompt_lengths: list[int] | None = None,
    new_tokens: int = 24,
    record: str = "nvidia-h200",
) -> Rung:
    """A rung for its notebook, against ``before`` (by default the rung that it changes).

    batch: sequences that decode together; prompt_lengths: tokens, taken in turn; new_tokens: a sequence.
    record: the folder of records. Raises ParameterError, RecipeError, RecordError.
    """
    after, lengths = get_rung(rung), [2, 40, 90] if prompt_lengths is None else prompt_lengths
    gpt = get_model(model, device, dtype, load_format)
    check_parameters(gpt, batch=batch, prompt_lengths=lengths, new_tokens=new_tokens)
    exact = partial(get_model, model, device, "float32", load_format)
    before = get_rung(before or BEFORE[after])
    return Rung(before, after, gpt, exact, lengths, batch, new_tokens, find(record))


def exercise(answer: Callable[..., Any], check: Callable[[Callable[..., Any]], bool]) -> None:
    """Tell whether the reader's function is right; one whose body is still ``...`` waits to be written."""
    code = answer.__code__
    if code.co_code == _unwritten.__code__.co_code and set(code.co_consts) <= {answer.__doc__, None}:
        print(f"{answer.__name__}: yours to write")
    else:
        print(f"{answer.__name__}: {'right' if check(answer) else 'not yet right'}")


def _unwritten() -> None:
    """What a function of nothing but a docstring and ``...`` compiles to."""
    ...


def _counted(old: Run, new: Run) -> list[list[Any]]:
    """What a step asked of the machine; on a CPU its time would tell nothing of a GPU."""
    work = "GPU kernels" if old.trace.on_gpu else "operators"
    kinds: list[tuple[str, Callable[[Run], int]]] = [
        (work, lambda run: run.trace.kernels),
        ("tensors allocated", lambda run: run.trace.allocations),
        ("kB allocated", lambda run: run.trace.allocated_bytes // 1000),
    ]
    return [[name, count(old), count(new)] for name, count in kinds]
