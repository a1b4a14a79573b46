"""Keep README.md true: ``python -m rosellm.lab.running.readme`` rewrites its computed parts.

With ``--check`` it only reports whether they are up to date. ``--record nvidia-h200,my-gpu`` shows other
machines beside the reference from then on: a comment in README.md keeps the choice. Computed are the
ladder's pictures for light and dark pages (``notebooks/results/ladder-*.svg``), the table of results, and the
notebook index with each notebook's finding, the tables of modern models, of what bounds their steps and
GPT-2's, of attention of prompts, and of what users' calls reach. All but the pictures are between HTML
comments with their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import nbformat
from nbformat import NotebookNode

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.errors import RoseError
from rosellm.lab.figures.ladder import README_RIVALS, README_THEMES, readme_chart
from rosellm.lab.figures.ladder_svg import ladder_svg
from rosellm.lab.recorded import MIXED_LEDGERS
from rosellm.lab.records import prompt_attention, user_calls
from rosellm.lab.records.findings import UNTOLD, finding
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.machines import beside, find_machines, name_of
from rosellm.lab.records.model_ladder import by_role, recorded_ledgers
from rosellm.lab.records.model_runs import Row, recorded_models, runs_told, table, unit_of
from rosellm.lab.records.records import (
    RecordError,
    Results,
    UnlikeError,
    find,
    floor_tok_s,
    number,
    results_folder,
    rivals,
)
from rosellm.lab.records.sizes import LEDGER_WORKLOADS
from rosellm.lab.records.verdicts import WORKLOADS
from rosellm.lab.running.gallery import reading_minutes
from rosellm.roseinfer.bench.workloads import MODEL_WORKLOADS, WORKLOADS as WORKLOADS_BY_NAME
from rosellm.roseinfer.recipe import BEST_RUNG, SIDE_BRANCHES

ROOT = results_folder().parent.parent
RECORD = re.compile(r"<!-- record: ([\w., -]+?) -->")
ROLES_TOLD = {"GEMM": "products"}
TURNS = "P512", "MIX", "TTFT64", "TTFT1K"  # workloads of prompts and answers by turns, and of first tokens
PICTURES = {name: f"notebooks/results/ladder-{name}.svg" for name in README_THEMES}


def results_table(machines: Sequence[Results]) -> str:
    """Every workload: the ladder's start and best rung, the rivals, and the share of the bytes floor.

    Other machines stand below the reference, whose rivals these are.
    """
    rows = [
        "| workload | `dense` | best rung | | vLLM 0.22.1 | transformers | of the bytes floor |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    results = machines[0]

    def cells(of: Results, workload: str) -> list[str]:
        others = rivals(workload) if of is results else {}
        return _measured(of, workload, [others.get(name, {}).get(workload) for name in README_RIVALS])

    table, lacking = beside(machines, WORKLOADS, cells)
    rows += [f"| {' | '.join(row)} |" for row in table]
    where = results.environment_line(f"W3-{BEST_RUNG}")
    told = f"Completion tokens per second of the whole run, medians. {where}."
    return "\n".join([*rows, "", told, *_sentences(lacking)])


def _sentences(lines: Sequence[str]) -> list[str]:
    return [f"{line[0].upper()}{line[1:]}." for line in lines]


def _measured(results: Results, workload: str, others: Sequence[float | None]) -> list[str]:
    values = results.values(workload)
    if not values:
        raise RecordError(f"{results.folder.name} has no {workload}")
    best = max(values.keys() - SIDE_BRANCHES, key=values.__getitem__)
    try:
        share = values[best] / floor_tok_s(results, workload) * 100
    except RecordError:  # without this device's bandwidth
        share = None
    told = [number(value) for value in (values.get("dense"), values[best], *others)]
    of_floor = "–" if share is None else f"{number(share)} %"
    return [told[0], f"**{told[1]}**", f"`{best}`", *told[2:], of_floor]


def notebook_index(machines: Sequence[Results]) -> str:
    """A row per notebook: its title, the minutes to read it, and what the records say about its rung.

    Another machine is left out where it has nothing to say.
    """
    results, *others = machines
    rows = ["| notebook | what it is about | min | finding on the recorded GPU |", "|---|---|--:|---|"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, 4)
        found = [finding(results, path.stem)]
        beside_it = {name_of(other): finding(other, path.stem) for other in others}
        found += [f"{name}: {told}" for name, told in beside_it.items() if told != UNTOLD]
        cells = _title(notebook), str(reading_minutes(notebook)), "<br>".join(found)
        rows.append(f"| [{path.stem}](notebooks/{path.name}) | {' | '.join(cells)} |")
    return "\n".join(rows)


def _title(notebook: NotebookNode) -> str:
    """The heading without its number, and the question below it if the heading names a technique."""
    first, *rest = filter(None, notebook.cells[0].source.splitlines())
    title = first.lstrip("# ").partition("·")[2].strip() or first.lstrip("# ")
    return f"{title}: {rest[0]}" if rest and re.fullmatch(r"\*[^*]+\?\*", rest[0]) else title


def models_table(machines: Sequence[Results]) -> str:
    """Every workload of modern models: ours in bold, then the rival's and the floor in brackets.

    Other machines have columns of their own, without another's rival and floor.
    """
    results, *others = machines
    models = recorded_models(results)
    columns = {model: {row.workload: row for row in table(results, model)} for model in models}
    for other in others:
        for model in recorded_models(other):
            own = (row._replace(rival=None, floor=None) for row in table(other, model))
            columns[f"{model}, {name_of(other)}"] = {row.workload: row for row in own if row.ours}
    rows = [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for workload in MODEL_WORKLOADS:
        cells = [_cell(column.get(workload)) for column in columns.values()]
        if any(cells):
            rows.append(f"| {workload}, {unit_of(MODEL_WORKLOADS[workload])} | {' | '.join(cells)} |")
    where = Results(results.folder / models[0]).environment_line("D1") if models else ""
    runs = f"medians of whole runs after a first ({runs_told(results)})" if models else "no records yet"
    lacking = [f" None of {name_of(other)}." for other in others if not recorded_models(other)]
    return "\n".join([*rows, "", f"**Ours** (vLLM 0.22.1; floor), {runs}. {where}.{''.join(lacking)}"])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    ours = "–" if row.ours is None else f"**{number(row.ours)}**"
    if row.rival is None and row.floor is None:
        return ours
    return f"{ours} ({number(row.rival)}; {number(row.floor)})"


def bounds_table(machines: Sequence[Results]) -> str:
    """What a recorded step or prefill of each modern model takes, its floor, and where the rest goes.

    Other machines have columns of their own. A model without ledgers is left out.
    """
    columns = {}
    for results in machines:
        for model in recorded_models(results):
            if "ledgers" in Results(results.folder / model).names():
                where = "" if results is machines[0] else f", {name_of(results)}"
                columns[f"{model}{where}"] = recorded_ledgers(results, model)
    return _bounds(columns, MODEL_WORKLOADS)


def turns_table(_machines: Sequence[Results]) -> str:
    """The same of ``TURNS``, by the records of an H100."""
    results = find(MIXED_LEDGERS)
    models = sorted(path.parent.name for path in results.folder.glob("*/ledgers.json"))
    return _bounds({model: recorded_ledgers(results, model) for model in models}, TURNS)


def _bounds(columns: Mapping[str, Mapping[str, Ledger]], workloads: Iterable[str]) -> str:
    """Model → workload → its ledger, as a table."""
    rows = [f"| µs | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for workload in workloads:
        cells = [
            _above_floor(ledgers[workload]) if workload in ledgers else "–" for ledgers in columns.values()
        ]
        if any(cell != "–" for cell in cells):
            rows.append(f"| {workload} | {' | '.join(cells)} |")
    return "\n".join(rows)


def steps_table(machines: Sequence[Results]) -> str:
    """What a recorded step of the best rung takes at four workloads' sizes, its floor, where the rest goes.

    A machine without ledgers is left out.
    """
    rows = [f"| µs | {' | '.join(LEDGER_WORKLOADS)} |", f"|---|{'--:|' * len(LEDGER_WORKLOADS)}"]
    batches = [str(WORKLOADS_BY_NAME[name].max_batch_size) for name in LEDGER_WORKLOADS]
    for results in (one for one in machines if "ledger" in one.names()):
        where = "" if results is machines[0] else f", {name_of(results)}"
        ledgers = (Ledger.from_dict(results.figures("ledger", batch, BEST_RUNG)) for batch in batches)
        rows.append(f"| `{BEST_RUNG}`{where} | {' | '.join(map(_above_floor, ledgers))} |")
    return "\n".join(rows)


def _above_floor(ledger: Ledger) -> str:
    """The step, its floor, and the roles that take a tenth or more of what lies between, largest first."""
    above = {role: time.us - (time.floor_us or 0.0) for role, time in by_role(ledger).items()}
    floor_us = ledger.floor_us or 0.0
    least = (ledger.step_us - floor_us) / 10
    largest = sorted((role for role in above if above[role] >= least), key=above.__getitem__, reverse=True)
    roles = ", ".join(f"{ROLES_TOLD.get(role, role)} {above[role]:+,.0f}" for role in largest)
    return f"**{ledger.step_us:,.0f}** ({f'{floor_us:,.0f}' if floor_us else '–'}; {roles})"


def prompts_table(machines: Sequence[Results]) -> str:
    """Attention of whole prompts on each model's heads: ours in bold, the libraries' in brackets, TFLOP/s."""
    columns: dict[str, dict[str, str]] = {}
    for results in machines:
        where = "" if results is machines[0] else f", {name_of(results)}"
        for model, figures in prompt_attention.recorded(results).items():
            cells = {f"{one['prompts']} × {int(n):,}": _speeds(one) for n, one in figures.items()}
            columns[f"{model}{where}"] = cells
    rows = [f"| TFLOP/s | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for prompts in dict.fromkeys(name for cells in columns.values() for name in cells):
        rows.append(f"| {prompts} | {' | '.join(cells.get(prompts, '–') for cells in columns.values())} |")
    return "\n".join(rows)


def _speeds(measured: Mapping[str, Any]) -> str:
    speeds = prompt_attention.tflop_s(measured)
    share = f"{prompt_attention.of_best_library(speeds):.0%}".replace("%", " %")
    others = (number(speed) for name, speed in speeds.items() if name != prompt_attention.OURS)
    return f"**{number(speeds[prompt_attention.OURS])}** ({'; '.join(others)}): {share}"


def calls_table(machines: Sequence[Results]) -> str:
    """Of each recorded workload: the scheduler's tokens a second, and what is left of them to those who call.

    A machine without the record is left out; one whose record is of another model or size is told below.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    refused = []
    for results in machines:
        where = "" if results is machines[0] else f", {name_of(results)}"
        try:
            recorded = user_calls.recorded(results)
        except UnlikeError as error:
            refused.append(f"{error.why}{where}")
            continue
        found += [(f"{workload}{where}", figures) for workload, figures in recorded.items()]
    _, *calls = [way for way in user_calls.CALLS if not found or any(way in each for _, each in found)]
    heads = " | ".join(f"`{call}`" for call in calls)
    rows = [f"| | `{user_calls.BENEATH}`, tok/s | {heads} |", "|---|--:|" + "--:|" * len(calls)]
    rows += [f"| {name} | {' | '.join(_calls_cells(figures, calls))} |" for name, figures in found]
    return "\n".join([*rows, "", *_sentences(refused)] if refused else rows)


def _calls_cells(figures: dict[str, Any], calls: Sequence[str]) -> list[str]:
    """The scheduler's tokens a second, and each call's share of them; a dash: not recorded."""
    shares = user_calls.shares(figures)
    told = (f"{shares[call]:.1%}".replace("%", " %") if call in shares else "–" for call in calls)
    return [number(user_calls.rate(figures, user_calls.BENEATH)), *told]


SECTIONS: dict[str, Callable[[Sequence[Results]], str]] = {
    "results": results_table,
    "steps": steps_table,
    "notebooks": notebook_index,
    "models": models_table,
    "bounds": bounds_table,
    "turns": turns_table,
    "prompts": prompts_table,
    "calls": calls_table,
}


def updated(text: str) -> str:
    """README text with every computed section renewed, of the machines that it names."""
    machines = find_machines(chosen(text))
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        found = pattern.search(text)
        if not found:
            raise RoseError(f"README.md has no section between <!-- {name} --> and <!-- /{name} -->")
        text = f"{text[: found.end(1)]}{section(machines)}\n{text[found.start(2) :]}"
    return text


def chosen(text: str) -> str:
    """The machines that README text shows, as the option ``--record`` takes them."""
    found = RECORD.search(text)
    if not found:
        raise RoseError("README.md has no comment like <!-- record: nvidia-h200 -->")
    return found[1]


@command
def main(argv: list[str] | None = None) -> None:
    """Rewrite the computed parts, or with ``--check`` fail if anything would change."""
    parser = OneLineParser(
        prog="python -m rosellm.lab.running.readme", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if something is out of date"
    )
    parser.add_argument("--record", help="folders of records to show, comma-separated; default: as before")
    arguments = parser.parse_args(argv)
    stale = stale_files(arguments.record)
    if arguments.check and stale:
        raise RoseError(f"{', '.join(stale)} out of date: run python -m rosellm.lab.running.readme")
    for name, text in stale.items():
        write_text(ROOT / name, text)
        print(f"{name} renewed")


def stale_files(record: str | None = None) -> dict[str, str]:
    """File → the text it should have, for files that differ. record: machines to show instead."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if record is not None:
        folders = ",".join(results.folder.name for results in find_machines(record))
        readme = RECORD.sub(f"<!-- record: {folders} -->", readme)
    machines = find_machines(chosen(readme))
    wanted = {"README.md": updated(readme)}
    wanted |= {
        PICTURES[name]: ladder_svg(readme_chart(machines, theme)) for name, theme in README_THEMES.items()
    }
    return {
        name: text
        for name, text in wanted.items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    }


if __name__ == "__main__":
    raise SystemExit(main())
