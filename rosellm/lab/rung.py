"""Everything that a rung's notebook shows, one call each: ``nb = open_rung("cuda_graph", batch=6)``.

A notebook compares a rung with the previous one: the change in the recipe, the data flow figure, both
sources, a prediction, a run of both rungs on this machine, a check that their tokens are equal, and the
records of the reference GPU next to those of other machines that the reader selects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from xml.etree import ElementTree

import torch
from IPython.display import display

from rosellm.bench.workloads import WORKLOADS
from rosellm.errors import RecipeError, RoseError
from rosellm.lab.figures.bars import before_after
from rosellm.lab.figures.charts import say, show, show_table, text_table
from rosellm.lab.figures.slider import Control, explore
from rosellm.lab.figures.source import show_pair, show_source
from rosellm.lab.recorded import RecordedPair
from rosellm.lab.records.bench import Bench, Run, compare, decode_tokens, equality, get_model, make_prompts
from rosellm.lab.records.machines import find_machines, name_of
from rosellm.lab.records.parameters import check_least_new, check_parameters
from rosellm.lab.records.records import REFERENCE, RecordError, number, results_folder, signed
from rosellm.lab.records.verdicts import verdicts
from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels.table import choose_kernels
from rosellm.roseinfer.recipe import BEFORE, LADDER, get_rung

__all__ = [  # what notebooks take from here
    "BEFORE", "LADDER", "WORKLOADS", "Bench", "ClaimError", "Control", "Rung", "exercise", "explore",
    "get_model", "make_prompts", "median", "name_of", "number", "open_rung", "partial", "say", "show",
    "show_table", "signed", "text_table", "torch", "verdicts",
]  # fmt: skip

CLOSEST_CALL = 1e-3  # smallest gap of two fp32 logits that summation order cannot reverse
ON_TORCH = "\n(on a CPU both run the kernels' torch specifications: this compares the host's code only)"


class ClaimError(RoseError, AssertionError):
    """Two rungs give different tokens."""


@dataclass(kw_only=True)
class Rung(RecordedPair):
    """A rung and the previous one, with the model, prompts and records that a notebook's parameters select.

    gpt: the model.
    exact: returns the same model in fp32.
    prompt_lengths: tokens per prompt; the prompts cycle through them.
    batch: number of sequences decoded together.
    new_tokens: tokens that each sequence generates.
    runs: the runs of both rungs, set by :meth:`compare`.
    """

    gpt: Transformer
    exact: Callable[[], Transformer]
    prompt_lengths: list[int]
    batch: int
    new_tokens: int
    runs: tuple[Run, Run] | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """``batch`` prompts of random token ids, the same each time."""
        return make_prompts(self.batch, self.prompt_lengths, self.gpt.config.vocab_size)

    @property
    def refusal(self) -> str:
        """The reason why one of the two rungs cannot run this model; "" if both can."""
        for rung in (self.before, self.after):
            try:
                LADDER[rung].check_serves(self.gpt.config)
            except RecipeError as error:
                return str(error)
        return ""

    def flow(self, name: str | None = None) -> None:
        """Display a data flow figure.

        name: of the file ``notebooks/flows/NAME.svg``, by default the rung's name.

        Raises RecordError if there is no such file.
        """
        path = results_folder().parent / "flows" / f"{name or self.after}.svg"
        if not path.is_file():
            raise RecordError(f"there is no figure flows/{path.name} beside the notebooks")
        svg = path.read_text(encoding="utf-8").rstrip()
        root = ElementTree.fromstring(svg)
        words = "\n".join(root.findtext(f"{{*}}{name}", "") for name in ("title", "desc"))
        display({"image/svg+xml": svg, "text/plain": words}, raw=True)

    source = staticmethod(show_source)
    sources = staticmethod(show_pair)

    def bench(self, batch: int, prompt_length: int, new_tokens: int, **options: Any) -> Bench:
        """Return a bench of the rung ``after``, with ``batch`` prefilled sequences ready to decode.

        options: further arguments of ``Bench``.
        """
        prompts = make_prompts(batch, prompt_length, self.gpt.config.vocab_size)
        return Bench(self.gpt, self.after, prompts, new_tokens, **options)

    def compare(self) -> None:
        """Run both rungs here on the same prompts, and show what a decode step takes.

        On a GPU: its time, kernels and allocations; on a CPU: its operators, allocations and bytes allocated.
        If a rung cannot run the model, the reason is printed instead. Raises ParameterError if the model has
        too few positions for the prompts and the ``LEAST_TOKENS`` that timing needs.
        """
        if self.refusal:
            print(self.refusal)
            return
        self.runs = compare(self.gpt, self.before, self.after, self.prompts, self.new_tokens)
        old, new = (run.trace for run in self.runs)
        if old.on_gpu:
            labels, units = ["step time (median)", "GPU kernels a step", "allocations a step"], ["ms", "", ""]
            one, two = ([run.step_ms, run.trace.kernels, run.trace.allocations] for run in self.runs)
            title = f"One decode step of {self.batch} sequences here"
            show(before_after(labels, one, two, units, (self.before, self.after), title=title))
            return
        rows = [
            ["operators", old.kernels, new.kernels],
            ["tensors allocated", old.allocations, new.allocations],
            ["kB allocated", old.allocated_bytes // 1000, new.allocated_bytes // 1000],
        ]
        heading = "per step (a CPU runs the kernels' torch specifications)"
        show_table([heading, self.before, self.after], rows)

    def tokens_equal(self, *others: Rung) -> None:
        """Generate a few tokens with both rungs here, in fp32, and print that they are equal.

        others: further pairs to check.

        Prints that the tokens differ at a near-tie if the two best logits were almost equal somewhere, and
        the reason if a rung cannot run the model. Raises ClaimError if tokens differ otherwise.
        """
        lines = [line for pair in (self, *others) for line in pair.compared_tokens().splitlines()]
        for line in reversed(dict.fromkeys(reversed(lines))):  # what concerns all of them once, at the end
            print(line)

    def compared_tokens(self) -> str:
        """Return what :meth:`tokens_equal` prints of this pair."""
        if self.refusal:
            return self.refusal
        batch, new_tokens = min(self.batch, 3), min(self.new_tokens, 8)
        gpt, pair = self.exact(), (self.before, self.after)
        prompts = make_prompts(batch, self.prompt_lengths, gpt.config.vocab_size, seed=1)
        one, two = (decode_tokens(gpt, rung, prompts, new_tokens, gate_from=1) for rung in pair)
        if one != two:
            logits = equality(gpt, list(pair), self.prompt_lengths, batch, new_tokens)[self.after]
            if logits["smallest_gap_of_reference"] >= CLOSEST_CALL:
                raise ClaimError(f"{self.after} gives other tokens than {self.before} in fp32")
        kinds = {choose_kernels("auto", LADDER[rung].launch, self.gpt.device).name for rung in pair}
        same = "generate the same" if one == two else "part at a near-tie of two logits within"
        said = "fp32, here: {} and {} {} {} tokens for {} prompts".format(*pair, same, new_tokens, batch)
        return said + ON_TORCH * (kinds == {"torch"})


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
    least_new_tokens: int = 1,
    record: str = REFERENCE,
) -> Rung:
    """Open a rung for its notebook.

    rung: its name.
    before: the rung to compare it with; None for the previous rung.
    model, load_format, device, dtype: the model to run here, as in :func:`get_model`.
    batch: number of sequences decoded together.
    prompt_lengths: tokens per prompt; the prompts cycle through them. None for 2, 40 and 90.
    new_tokens: tokens that each sequence generates.
    least_new_tokens: minimum of ``new_tokens`` that the notebook's runs need.
    record: comma-separated names of record folders to show next to ``nvidia-h200``, on which the notebook's
        sentences rest; ``here`` means this machine's.

    Raises ParameterError, RecipeError or RecordError for an invalid parameter, rung or record.
    """
    after, lengths = get_rung(rung), [2, 40, 90] if prompt_lengths is None else prompt_lengths
    gpt = get_model(model, device, dtype, load_format)
    check_parameters(gpt, batch=batch, prompt_lengths=lengths, new_tokens=new_tokens)
    check_least_new(least_new_tokens, new_tokens)
    results, *others = find_machines(record)
    return Rung(
        before=get_rung(before or BEFORE[after]),
        after=after,
        results=results,
        others=tuple(others),
        gpt=gpt,
        exact=partial(get_model, model, device, "float32", load_format),
        prompt_lengths=lengths,
        batch=batch,
        new_tokens=new_tokens,
    )


def exercise(
    answer: Callable[..., Any],
    check: Callable[[Callable[..., Any]], bool | str] | None = None,
    *,
    cases: Iterable[tuple[tuple[Any, ...], Any]] = (),
) -> None:
    """Print whether the reader's function is right, and if not, what came of the first case that fails.

    answer: the function; it is reported as unwritten if its body is still ``...``.
    check: for answers that are right in several ways: takes the function, and returns True or a string that
        says what came instead of what.
    cases: pairs of arguments and the expected value; tested before ``check``.
    """
    code = answer.__code__
    if code.co_code == _unwritten.__code__.co_code and set(code.co_consts) <= {answer.__doc__, None}:
        print(f"{answer.__name__}: yours to write")
    else:
        fails = what_fails(answer, check, cases=cases)
        print(f"{answer.__name__}: {'right' if fails is None else f'not yet right{fails}'}")


def what_fails(
    answer: Callable[..., Any],
    check: Callable[[Callable[..., Any]], bool | str] | None = None,
    *,
    cases: Iterable[tuple[tuple[Any, ...], Any]] = (),
) -> str | None:
    """Return None if ``answer`` is right, else ": " and a description of the first failure.

    The arguments are those of :func:`exercise`. Returns "" if ``check`` fails without a description.
    """
    for arguments, wanted in cases:
        call = f"{answer.__name__}({', '.join(_shortly(one, 40) for one in arguments)})"
        try:
            got = answer(*arguments)
        except Exception as error:  # the reader's code may raise anything
            return f": {call} raises {error!r}, expected {_shortly(wanted)}"
        if not _same(got, wanted):
            return f": {call} → {_shortly(got)}, expected {_shortly(wanted)}"
    try:
        found = check(answer) if check else True
    except Exception as error:
        return f": the check ends with {error!r}"
    if isinstance(found, str):
        return f": {found}"
    return None if found else ""


def _same(got: Any, wanted: Any) -> bool:
    """Return whether ``got`` equals ``wanted``.

    Floats are compared with relative tolerance 1e-4, sequences element by element whatever their type, and
    tensors with tensors exactly; where numbers are expected, a tensor counts as its numbers.
    """
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and torch.equal(got, wanted)
    got = got.tolist() if isinstance(got, torch.Tensor) else got
    if isinstance(wanted, (list, tuple)):
        one = list(got) if isinstance(got, Iterable) else []
        return len(one) == len(wanted) and all(map(_same, one, wanted))
    if isinstance(wanted, float) and isinstance(got, (int, float)):
        return math.isclose(got, wanted, rel_tol=1e-4)
    return bool(got == wanted)


def _shortly(value: Any, most: int = 60) -> str:
    """Return a value on one line of at most ``most`` characters: a function by its name, a float rounded."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = getattr(value, "__qualname__", None) or " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}…"


def _unwritten() -> None:
    """Do nothing: the bytecode of a function that consists of a docstring and ``...``, for comparison."""
    ...
