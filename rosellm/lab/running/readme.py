"""Keep README.md true: ``python -m rosellm.lab.running.readme`` rewrites its computed parts.

With ``--check`` it only reports whether they are up to date. Computed are the ladder's pictures for light and
dark pages (``notebooks/results/ladder-*.svg``), the table of results, and the notebook index with each
notebook's finding, and the table of modern models. All but the pictures are between HTML comments with
their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import nbformat
from nbformat import NotebookNode

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.errors import RoseError
from rosellm.lab.figures.ladder import README_RIVALS, README_THEMES, readme_chart
from rosellm.lab.figures.ladder_svg import ladder_svg
from rosellm.lab.records.findings import finding
from rosellm.lab.records.model_runs import Row, recorded_models, runs_told, table, unit_of
from rosellm.lab.records.records import Results, find, floor_tok_s, number, results_folder, rivals
from rosellm.lab.records.verdicts import WORKLOADS
from rosellm.lab.running.gallery import reading_minutes
from rosellm.roseinfer.bench.workloads import MODEL_WORKLOADS
from rosellm.roseinfer.recipe import BEST_RUNG, SIDE_BRANCHES

ROOT = results_folder().parent.parent
PICTURES = {name: f"notebooks/results/ladder-{name}.svg" for name in README_THEMES}


def results_table(results: Results) -> str:
    """Every workload: the ladder's start and best rung, the rivals, and the share of the bytes floor."""
    rows = [
        "| workload | `dense` | best rung | | vLLM 0.22.1 | transformers | of the bytes floor |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for workload in WORKLOADS:
        values = results.values(workload)
        others = [rivals(workload).get(name, {}).get(workload) for name in README_RIVALS]
        best, share = "–", None
        if values:
            best = max(values.keys() - SIDE_BRANCHES, key=values.__getitem__)
            share = values[best] / floor_tok_s(results, workload) * 100
        rows.append(
            f"| {workload} | {number(values.get('dense'))} | **{number(values.get(best))}** | `{best}` "
            f"| {' | '.join(number(value) for value in others)} | {number(share)} % |"
        )
    where = results.environment_line(f"W3-{BEST_RUNG}")
    return "\n".join([*rows, "", f"Completion tokens per second of the whole run, medians. {where}."])


def notebook_index(results: Results) -> str:
    """A row per notebook: its title, the minutes to read it, and what the records say about its rung."""
    rows = ["| notebook | what it is about | min | finding on the recorded GPU |", "|---|---|--:|---|"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, 4)
        cells = _title(notebook), str(reading_minutes(notebook)), finding(results, path.stem)
        rows.append(f"| [{path.stem}](notebooks/{path.name}) | {' | '.join(cells)} |")
    return "\n".join(rows)


def _title(notebook: NotebookNode) -> str:
    """The heading without its number, and the question below it if the heading names a technique."""
    first, *rest = filter(None, notebook.cells[0].source.splitlines())
    title = first.lstrip("# ").partition("·")[2].strip() or first.lstrip("# ")
    return f"{title}: {rest[0]}" if rest and re.fullmatch(r"\*[^*]+\?\*", rest[0]) else title


def models_table(results: Results) -> str:
    """Every workload of modern models: ours in bold, then the rival's and the floor in brackets."""
    models = recorded_models(results)
    columns = [{row.workload: row for row in table(results, model)} for model in models]
    rows = [f"| | {' | '.join(models)} |", f"|---|{'--:|' * len(models)}"]
    for workload in MODEL_WORKLOADS:
        cells = [_cell(column.get(workload)) for column in columns]
        if any(cells):
            rows.append(f"| {workload}, {unit_of(MODEL_WORKLOADS[workload])} | {' | '.join(cells)} |")
    where = Results(results.folder / models[0]).environment_line("D1") if models else ""
    runs = f"medians of whole runs after a first ({runs_told(results)})" if models else "no records yet"
    return "\n".join([*rows, "", f"**Ours** (vLLM 0.22.1; floor), {runs}. {where}."])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    ours = "–" if row.ours is None else f"**{number(row.ours)}**"
    return f"{ours} ({number(row.rival)}; {number(row.floor)})"


SECTIONS: dict[str, Callable[[Results], str]] = {
    "results": results_table,
    "notebooks": notebook_index,
    "models": models_table,
}


def updated(text: str, results: Results) -> str:
    """README text with every computed section renewed."""
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        found = pattern.search(text)
        if not found:
            raise RoseError(f"README.md has no section between <!-- {name} --> and <!-- /{name} -->")
        text = f"{text[: found.end(1)]}{section(results)}\n{text[found.start(2) :]}"
    return text


@command
def main(argv: list[str] | None = None) -> None:
    """Rewrite the computed parts, or with ``--check`` fail if anything would change."""
    parser = OneLineParser(
        prog="python -m rosellm.lab.running.readme", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if something is out of date"
    )
    check = parser.parse_args(argv).check
    stale = stale_files()
    if check and stale:
        raise RoseError(f"{', '.join(stale)} out of date: run python -m rosellm.lab.running.readme")
    for name, text in stale.items():
        write_text(ROOT / name, text)
        print(f"{name} renewed")


def stale_files() -> dict[str, str]:
    """File → the text it should have, for files that differ."""
    results = find()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = {"README.md": updated(readme, results)}
    wanted |= {
        PICTURES[name]: ladder_svg(readme_chart(results, theme)) for name, theme in README_THEMES.items()
    }
    return {
        name: text
        for name, text in wanted.items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    }


if __name__ == "__main__":
    raise SystemExit(main())
