"""The ladder as a picture for README.md, on a light or a dark page: three workloads, rivals, bytes floor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from rosellm.lab.figures.charts import short
from rosellm.lab.figures.palette import BLUE, GREEN, INK, MAGENTA, ORANGE, PALE, PAPER
from rosellm.lab.figures.svg import FONT
from rosellm.lab.records.records import Results, floor_tok_s, number, rivals
from rosellm.roseinfer.recipe import LADDER, SIDE_BRANCHES

PANELS = {"W1": "8 sequences at a time", "W2": "64 sequences", "W3": "256 sequences"}
RIVALS = ("vLLM 0.22.1", "transformers 5.17 generate")
FLOOR = "bytes floor"
LEFT, PANEL, GAP, ROW, TOP = 172, 262, 22, 24, 74


@dataclass(frozen=True)
class Theme:
    """Colours of a page: its ground is not drawn. lines: of the rivals, and of the floor."""

    text: str
    faint: str
    rung: str
    lines: tuple[str, str, str]


THEMES = {
    "light": Theme(text="#3f464f", faint="#7a838d", rung=BLUE, lines=(ORANGE, MAGENTA, GREEN)),
    "dark": Theme(text="#d0d7de", faint=PALE, rung="#3f7fc6", lines=("#ff8a3c", "#ee72ac", "#3cc98d")),
}


def ladder_picture(results: Results, theme: Theme) -> str:
    """Whole-run tokens per second of every rung on three workloads, with rivals and the floor, as SVG."""
    height, width = TOP + ROW * len(LADDER) + 46, LEFT + len(PANELS) * (PANEL + GAP)
    names = "".join(
        _text(
            LEFT - 10, TOP + ROW * i + 16, name, "end", theme.faint if name in SIDE_BRANCHES else theme.text
        )
        for i, name in enumerate(LADDER)
    )
    panels = "".join(
        _panel(results, workload, LEFT + i * (PANEL + GAP), height, theme)
        for i, workload in enumerate(PANELS)
    )
    title = f"Tokens per second of the whole run, GPT-2 small, fp16, on {results.device_name} (logarithmic)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{FONT}" font-size="12" role="img"><title>{escape(title)}</title>'
        f"{_text(8, 22, title, 'start', theme.text, 15, bold=True)}{names}{panels}{_legend(height, theme)}"
        "</svg>\n"
    )


def _panel(results: Results, workload: str, x: float, height: float, theme: Theme) -> str:
    values, others = results.values(workload), rivals(workload)
    marks = {name: others[name][workload] for name in RIVALS if name in others}
    marks[FLOOR] = floor_tok_s(workload)
    low = math.log10(min(values.values()) / 5)
    high = math.log10(max(*marks.values(), *values.values()) * 1.1)

    def place(value: float) -> float:
        return x + (math.log10(value) - low) / (high - low) * PANEL

    head = _text(x, 50, f"{workload}: {PANELS[workload]}", "start", theme.text, 13, bold=True)
    bars = [_bar(x, place(values[rung]), i, rung, values[rung], theme) for i, rung in enumerate(LADDER)]
    lines = [_line(name, place(value), value, height, theme) for name, value in marks.items()]
    return "".join([head, *bars, *lines])


def _bar(x: float, end: float, i: int, rung: str, value: float, theme: Theme) -> str:
    y, side = TOP + ROW * i, rung in SIDE_BRANCHES
    return (
        f'<rect x="{x}" y="{y + 3}" width="{end - x:.1f}" height="{ROW - 7}" rx="2" '
        f'fill="{PALE if side else theme.rung}"/>'
        + _text(x + 6, y + 16, number(value), "start", INK if side else PAPER)
    )


def _line(name: str, at: float, value: float, height: float, theme: Theme) -> str:
    colour = dict(zip((*RIVALS, FLOOR), theme.lines, strict=True))[name]
    dash = "" if name == FLOOR else ' stroke-dasharray="5 4"'
    side, shift = {RIVALS[0]: ("start", 3), RIVALS[1]: ("end", -3), FLOOR: ("middle", 0)}[name]
    return (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{height - 42}" stroke="{colour}" '
        f'stroke-width="1.8"{dash}/>' + _text(at + shift, TOP - 9, short(value), side, colour, 11)
    )


def _legend(height: float, theme: Theme) -> str:
    rungs = [("a rung", theme.rung), ("a side branch, kept off", PALE)]
    parts, x = [], LEFT
    for name, colour in [*rungs, *zip((*RIVALS, FLOOR), theme.lines, strict=True)]:
        parts.append(f'<rect x="{x}" y="{height - 25}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 18, height - 14.5, name, "start", theme.text))
        x += round(40 + 6.6 * len(name))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str, size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
