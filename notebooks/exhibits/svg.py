"""The notebooks' static pictures: SVG without scripts, for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from xml.etree import ElementTree

from rosellm.lab.figures.palette import TEXT

FONT = "Helvetica Neue, Arial, Liberation Sans, DejaVu Sans, sans-serif"
DASHED = f' stroke="{TEXT}" stroke-width="1.3" stroke-dasharray="5 4"'
LINE, TITLE_SIZE, BELOW_TITLE = 16, 15, 30.0

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


@dataclass(frozen=True)
class Picture:
    """An SVG picture; the last line of a cell, or ``display``, shows it."""

    svg: str

    @property
    def description(self) -> str:
        """What it shows in words: its ``<title>`` and ``<desc>``."""
        root = ElementTree.fromstring(self.svg)
        return "\n".join(root.findtext(f"{{*}}{name}", "") for name in ("title", "desc"))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.description}


def text_width(text: str, size: float, bold: bool = False) -> float:
    """The most pixels that ``text`` takes in the fonts named by ``FONT``."""
    return sum(WIDTH_OF.get(character, 1.01) for character in text) * size * (BOLD if bold else 1)


def picture(width: float, height: float, title: str, parts: Sequence[str], description: str) -> Picture:
    """Parts from ``BELOW_TITLE`` on, without a background; wider if the title needs it."""
    width = max(width, text_width(title, TITLE_SIZE, bold=True) + 12)
    heading = texts([title], 4, 20, TITLE_SIZE, TEXT, ' font-weight="bold"', "start")
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {px(width)} {px(height)}" width="{px(width)}" '
        f'height="{px(height)}" role="img" font-family="{FONT}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{heading}{''.join(parts)}</svg>"
    )


def texts(
    lines: Sequence[str],
    x: float,
    y: float,
    size: float,
    colour: str,
    extra: str = "",
    anchor: str = "middle",
) -> str:
    """Lines below each other, the first baseline at ``y``; ``extra`` are further attributes."""
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"{extra}'
    return "".join(
        f'<text x="{px(x)}" y="{px(y + i * LINE)}" {style}>{escape(line)}</text>'
        for i, line in enumerate(lines)
    )


def rect(x: float, y: float, width: float, height: float, radius: float, fill: str, extra: str = "") -> str:
    size = f'width="{px(width)}" height="{px(height)}" rx="{px(radius)}"'
    return f'<rect x="{px(x)}" y="{px(y)}" {size} fill="{fill}"{extra}/>'


def px(value: float) -> str:
    """Pixels with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")
