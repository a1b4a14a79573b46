"""Keeps README.md true: ``python -m rosellm.lab.readme`` rewrites what is computed there.

With ``--check`` it only tells whether that is up to date. Computed are the ladder's picture
(``notebooks/results/ladder.svg``), the table of results and the notebook index with each one's finding. The
last two stand between HTML comments that name them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import nbformat

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser
from rosellm.errors import RoseError
from rosellm.lab.charts import BLUE, GREEN, MAGENTA, ORANGE, PALE, TEXT
from rosellm.lab.compare import WORKLOADS, verdicts
from rosellm.lab.diagrams import FONT
from rosellm.lab.records import Results, find, floor_tok_s, number, results_folder, rivals
from rosellm.roseinfer.cli import command
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG, LADDER, SIDE_BRANCHES

ROOT = results_folder().parent.parent
PICTURE = "notebooks/results/ladder.svg"
PANELS = {"W1": "8 sequences at a time", "W2": "64 sequences", "W3": "256 sequences"}
LINES = {"vLLM 0.22.1": ORANGE, "transformers 5.17 generate": MAGENTA}
NOTEBOOK_OF = {
    "01_paged_attention": "paged",
    "02_mask_removal": "no_mask",
    "03_pinned_h2d": "pinned_h2d",
    "04_autotune": "autotune",
    "05_cuda_graph": "cuda_graph",
    "06_triton_append": "triton_append",
    "07_full_batch": "full_batch",
    "08_identity_pos": "identity_pos",
    "09_mutable_block_info": "mutable_block_info",
    "10_reused_index_buffers": "reused_index_buffers",
    "11_resident_tables": "resident_tables",
    "12_one_table": "one_table",
    "13_resident_step": "resident_step",
    "14_packed_prefill": "packed_prefill",
    "15_fused_append": "fused_append",
    "16_fused_norm": "fused_norm",
    "17_fused_gelu": "fused_gelu",
    "18_fused_head": "fused_head",
    "19_small_gemm": "small_gemm",
    "20_dependent_launch": "dependent_launch",
    "21_split_kv": "split_kv",
    "22_persistent_kernel": "persistent_kernel",
}
LEFT, PANEL, GAP, ROW, TOP = 172, 262, 22, 24, 74


def ladder_picture(results: Results) -> str:
    """Whole-run tokens per second of every rung on three workloads, with rivals and the floor, as SVG."""
    height = TOP + ROW * len(LADDER) + 46
    width = LEFT + len(PANELS) * (PANEL + GAP)
    names = "".join(
        _text(LEFT - 10, TOP + ROW * i + 16, name, "end", PALE if name in SIDE_BRANCHES else TEXT)
        for i, name in enumerate(LADDER)
    )
    panels = "".join(
        _panel(results, workload, LEFT + i * (PANEL + GAP), height) for i, workload in enumerate(PANELS)
    )
    title = f"Tokens per second of the whole run, GPT-2 small, fp16, on {results.device_name} (logarithmic)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{FONT}" font-size="12" role="img"><title>{escape(title)}</title>'
        f"{_text(8, 22, title, 'start', TEXT, 15, bold=True)}{names}{panels}{_legend(height)}</svg>\n"
    )


def _panel(results: Results, workload: str, x: float, height: float) -> str:
    values = results.values(workload)
    marks = {
        colour: rivals(workload)[name][workload] for name, colour in LINES.items() if name in rivals(workload)
    }
    marks[GREEN] = floor_tok_s(workload)
    low, high = math.log10(min(values.values()) / 5), math.log10(max(*marks.values(), *values.values()) * 1.1)

    def place(value: float) -> float:
        return x + (math.log10(value) - low) / (high - low) * PANEL

    parts = [_text(x, 50, f"{workload}: {PANELS[workload]}", "start", TEXT, 13, bold=True)]
    for i, rung in enumerate(LADDER):
        y, end = TOP + ROW * i, place(values[rung])
        colour = PALE if rung in SIDE_BRANCHES else BLUE
        ink = "#10151c" if rung in SIDE_BRANCHES else "#ffffff"
        parts.append(
            f'<rect x="{x}" y="{y + 3}" width="{end - x:.1f}" height="{ROW - 7}" rx="2" fill="{colour}"/>'
        )
        parts.append(_text(x + 6, y + 16, number(values[rung]), "start", ink))
    for colour, value in marks.items():
        at, bottom = place(value), height - 42
        dash = "" if colour == GREEN else ' stroke-dasharray="5 4"'
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{bottom}" stroke="{colour}" '
            f'stroke-width="1.8"{dash}/>'
        )
        side, shift = (
            ("end", -3) if colour == MAGENTA else ("start", 3) if colour == ORANGE else ("middle", 0)
        )
        parts.append(_text(at + shift, TOP - 9, _short(value), side, colour, 11))
    return "".join(parts)


def _legend(height: float) -> str:
    entries = [
        (BLUE, "a rung"),
        (PALE, "a side branch, kept off"),
        *((c, n) for n, c in LINES.items()),
        (GREEN, "bytes floor"),
    ]
    parts, x = [], LEFT
    for colour, name in entries:
        parts.append(f'<rect x="{x}" y="{height - 25}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 18, height - 14.5, name, "start", TEXT))
        x += 40 + 6.6 * len(name)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str, size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'


def _short(value: float) -> str:
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value / 1e3:.3g}k"


def results_table(results: Results) -> str:
    """Every workload: the ladder's start and best rung, the rivals, and the share of the bytes floor."""
    rows = [
        "| workload | `dense` | best rung | | vLLM 0.22.1 | transformers | of the bytes floor |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for workload in WORKLOADS:
        values = results.values(workload)
        best = max(values, key=values.get)
        others = [rivals(workload).get(name, {}).get(workload) for name in LINES]
        share = values[best] / floor_tok_s(workload) * 100
        rows.append(
            f"| {workload} | {number(values['dense'])} | **{number(values[best])}** | `{best}` "
            f"| {' | '.join(number(value) for value in others)} | {number(share)} % |"
        )
    where = results.environment_line(f"W3-{BEST_RUNG}")
    return "\n".join([*rows, "", f"Completion tokens per second of the whole run, medians. {where}."])


def notebook_index(results: Results) -> str:
    """A row a notebook: its title, and what the records say of its rung."""
    rows = ["| notebook | question | finding on the recorded GPU |", "|---|---|---|"]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        rows.append(
            f"| [{path.stem}](notebooks/{path.name}) | {_title(path)} | {_told(results, path.stem)} |"
        )
    return "\n".join(rows)


def _title(path: Path) -> str:
    first = nbformat.read(path, 4).cells[0].source.splitlines()[0]
    return first.lstrip("# ").partition("·")[2].strip() or first.lstrip("# ")


def _told(results: Results, name: str) -> str:
    if name in OTHER_FINDINGS:
        return OTHER_FINDINGS[name](results)
    return _finding(results, NOTEBOOK_OF[name])


def _span(results: Results) -> str:
    values = results.values("W3")
    return f"W3: {number(values['dense'])} → {number(values[BEST_RUNG])} tok/s up the ladder"


def _split(results: Results) -> str:
    steps = results.load("grid")["figures"]["few"]
    pairs = zip(steps["dependent_launch"], steps["split_kv"], strict=True)
    gain, row = max((1 - new["step_us"] / old["step_us"], new["batch"]) for old, new in pairs)
    rows = "1 row" if row == 1 else f"{row} rows"
    return f"no workload passes its gate; behind it a step of {rows} takes up to {number(gain * 100)} % less"


def _invariance(results: Results) -> str:
    cost = results.load("determinism")["figures"]["cost"]
    lost = "; ".join(f"{workload} −{number(cost[workload]['cost'] * 100)} %" for workload in ("W2", "W3"))
    return f"no bit changes in any company, for {lost}"


def _pressure(results: Results) -> str:
    figures = results.load("kv_pressure")["figures"]
    kept = "; ".join(f"{workload} {number(one['ratio'] * 100)} %" for workload, one in figures.items())
    return f"what a quarter of the KV blocks leaves of the tokens a second: {kept}"


def _append(results: Results) -> str:
    rows = [row for row in results.load("kv_append")["rows"] if row["batch_size"] == 256]
    best = min(rows, key=lambda row: row["medians_s"]["device_rotating"])
    least, floor = best["medians_s"]["device_rotating"] * 1e6, best["floor_s"] * 1e6
    return (
        f"256 tokens: `{best['variant']}` takes {number(least)} µs of GPU time, its bytes {number(floor)} µs"
    )


OTHER_FINDINGS = {
    "00_map": _span,
    "21_split_kv": _split,
    "23_determinism": _invariance,
    "24_faults": _pressure,
    "25_your_kernel": _append,
}


def _finding(results: Results, rung: str) -> str:
    rows = verdicts(results, BEFORE[rung], rung)
    largest_first = sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
    told = [f"{row.workload} {row.change}" for row in largest_first if row.sign][:3]
    return "; ".join(told) or "no difference beyond the noise"


SECTIONS: dict[str, Callable[[Results], str]] = {"results": results_table, "notebooks": notebook_index}


def updated(text: str, results: Results) -> str:
    """README text with every computed section renewed."""
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise RoseError(f"README.md has no section between <!-- {name} --> and <!-- /{name} -->")
        text = pattern.sub(lambda m, s=section: f"{m[1]}{s(results)}\n{m[2]}", text)
    return text


@command
def main(argv: list[str] | None = None) -> None:
    """Rewrite what is computed, or with ``--check`` fail if anything would change."""
    parser = OneLineParser(prog="python -m rosellm.lab.readme", description=__doc__.partition("\n\n")[2])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if something is out of date"
    )
    check = parser.parse_args(argv).check
    stale = stale_files()
    if check and stale:
        raise RoseError(f"{', '.join(stale)} out of date: run python -m rosellm.lab.readme")
    for name, text in stale.items():
        write_text(ROOT / name, text)
        print(f"{name} renewed")


def stale_files() -> dict[str, str]:
    """File → the text it should have, for those that differ."""
    results = find()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = {"README.md": updated(readme, results), PICTURE: ladder_picture(results)}
    return {
        name: text
        for name, text in wanted.items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    }


if __name__ == "__main__":
    raise SystemExit(main())
