"""The notebooks' static pictures: SVG without scripts, for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rosellm.errors import RoseError
from rosellm.lab.figures.palette import TEXT

FONT = "Helvetica Neue, Arial, Liberation Sans, DejaVu Sans, sans-serif"
FREE, HELD, LINE = "rgba(127,127,127,0.12)", "#39424e", 16
DASHED = f' stroke="{TEXT}" stroke-width="1.3" stroke-dasharray="5 4"'
TITLE_WIDTH, TITLE_SIZE = 700, 15

# Advance widths of DejaVu Sans, the widest of the fonts that a page may take, in hundredths of the font size.
WIDTHS = {
    30: "'ijlIJ",
    37: " ,.-/:;\\|f·",
    42: "()[]!tr",
    54: '"*_`sz?c–',
    64: "LFkvxyPTYaeoESbdghnpqu$0123456789{}µ",
    70: "KAVBRXZC",
    79: "UHNDG&OQ",
    86: "w#+<=>^~M×→−≤≥÷",
    101: "%mW@…",
}
WIDTH_OF = {character: width / 100 for width, characters in WIDTHS.items() for character in characters}
BOLD = 1.13


class DiagramError(RoseError):
    """A picture of something that does not exist, or that contradicts itself."""


@dataclass(frozen=True)
class Picture:
    """An SVG picture and what it shows in words; the last line of a cell, or ``display``, shows it."""

    svg: str
    description: str

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.description}


def text_width(text: str, size: float, bold: bool = False) -> float:
    """The most pixels that ``text`` takes in the fonts named by ``FONT``."""
    return sum(WIDTH_OF.get(character, 1.01) for character in text) * size * (BOLD if bold else 1)


def wrap(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Lines of ``text`` no wider than ``width`` pixels; a single word that is wider is broken."""
    lines: list[str] = []
    for word in (piece for whole in text.split() for piece in _pieces(whole, width, size, bold)):
        if lines and text_width(f"{lines[-1]} {word}", size, bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _pieces(word: str, width: float, size: float, bold: bool) -> list[str]:
    """A word cut where it must be, after an underscore or dot if it has one."""
    if text_width(word, size, bold) <= width or len(word) < 2:
        return [word]
    fits = max(n for n in range(1, len(word)) if n == 1 or text_width(word[:n], size, bold) <= width)
    seam = max(word.rfind(mark, 0, fits) for mark in "_./")
    cut = seam + 1 if seam > 0 else fits
    return [word[:cut], *_pieces(word[cut:], width, size, bold)]


def picture(width: float, height: float, title: str, parts: Sequence[str], description: str) -> Picture:
    """Parts below a title, without a background; wider if the title needs it."""
    lines = wrap(title, TITLE_WIDTH, TITLE_SIZE, bold=True)
    width = max([width, *(text_width(line, TITLE_SIZE, bold=True) + 12 for line in lines)])
    heading = texts(lines, 4, 20, TITLE_SIZE, TEXT, 20, ' font-weight="bold"', "start")
    words = f"{title}\n{description}" if title else description
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {px(width)} {px(height)}" width="{px(width)}" '
        f'height="{px(height)}" role="img" font-family="{FONT}"><title>{escape(title or description)}</title>'
        f"<desc>{escape(description)}</desc>{heading}{''.join(parts)}</svg>"
    )
    return Picture(svg, words)


def title_height(title: str) -> float:
    """Where the parts below a title may begin."""
    return 20.0 * len(wrap(title, TITLE_WIDTH, TITLE_SIZE, bold=True)) + 10


def texts(
    lines: Sequence[str],
    x: float,
    y: float,
    size: float,
    colour: str,
    leading: float = LINE,
    extra: str = "",
    anchor: str = "middle",
) -> str:
    """Lines below each other, the first baseline at ``y``; ``extra`` are further attributes."""
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"{extra}'
    return "".join(
        f'<text x="{px(x)}" y="{px(y + i * leading)}" {style}>{escape(line)}</text>'
        for i, line in enumerate(lines)
    )


def rect(x: float, y: float, width: float, height: float, radius: float, fill: str, extra: str = "") -> str:
    size = f'width="{px(width)}" height="{px(height)}" rx="{px(radius)}"'
    return f'<rect x="{px(x)}" y="{px(y)}" {size} fill="{fill}"{extra}/>'


def px(value: float) -> str:
    """Pixels with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")
