"""What tensors look like."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod

from rosellm.lab.figures.palette import PALETTE, TEXT
from rosellm.lab.figures.svg import (
    DiagramError,
    Picture,
    picture,
    polygon,
    px,
    rect,
    text_width,
    texts,
    title_height,
)

MAX_WIDTH = 820.0


def tensor_shapes(tensors: Sequence[tuple[str, str, tuple[int, ...]]], title: str = "") -> Picture:
    """Boxes for tensors given as (name, dimensions ``"[B, H, D]"``, shape), edges growing with the logarithm.

    The last three dimensions are depth, height and width; those before them are written.
    """
    cells = [_tensor(*tensor) for tensor in tensors]
    if not cells:
        raise DiagramError("there is no tensor to draw")
    parts, x, y, row, widest = [], 8.0, title_height(title), 0.0, 0.0
    for svg, width, height in cells:
        if x > 8 and x + width > MAX_WIDTH:
            x, y, row = 8.0, y + row + 14, 0.0
        parts.append(f'<g transform="translate({px(x)} {px(y)})">{svg}</g>')
        x, row = x + width + 26, max(row, height)
        widest = max(widest, x - 18)
    rows = [
        f"{name} {dims} = {' × '.join(map(str, shape))}, {prod(shape):,} elements"
        for name, dims, shape in tensors
    ]
    return picture(widest, y + row + 6, title, parts, "\n".join(rows))


def _tensor(name: str, dims: str, shape: tuple[int, ...]) -> tuple[str, float, float]:
    """One tensor's drawing with its width and height."""
    letters = [part.strip() for part in dims.strip("[]").split(",")]
    if len(letters) != len(shape) or not shape or min(shape) < 1:
        raise DiagramError(f"{name}: the dimensions {dims} do not fit the shape {tuple(shape)}")
    sides = [12 + 11 * log2(n) for n in shape[::-1][:3]] + [0.0, 0.0, 0.0]
    w, h, d = sides[0], max(sides[1], 12.0), sides[2] * 0.45 if len(shape) > 2 else 0.0
    named = [f"{letter} = {n:,}" for letter, n in zip(letters[::-1], shape[::-1], strict=True)]
    left = text_width(named[1], 11) + 8 if len(shape) > 1 else 0.0
    head = [
        (name, 13, True),
        (dims, 11, False),
        *([(", ".join(named[:2:-1]), 11, False)] if len(shape) > 3 else []),
    ]
    top = 18.0 + 15 * (len(head) - 1)
    front = top + d + 4
    right = d / 2 + text_width(named[2], 11) + 4 if len(shape) > 2 else 0.0
    parts = [
        texts([text], 0, 13 + 15 * i, size, TEXT, anchor="start", extra=' font-weight="bold"' if bold else "")
        for i, (text, size, bold) in enumerate(head)
    ]
    colour, dark, light = PALETTE[0], "#2a5688", "#5b8dc4"
    if d:
        parts.append(
            polygon(
                [(left, front), (left + d, front - d), (left + w + d, front - d), (left + w, front)], light
            )
        )
        corner = [
            (left + w, front),
            (left + w + d, front - d),
            (left + w + d, front - d + h),
            (left + w, front + h),
        ]
        parts.append(polygon(corner, dark))
        parts.append(texts([named[2]], left + w + d / 2 + 6, front + h - d / 2 + 9, 11, TEXT, anchor="start"))
    parts.append(rect(left, front, w, h, 0, colour))
    parts.append(texts([named[0]], left + w / 2, front + h + 15, 11, TEXT))
    if len(shape) > 1:
        parts.append(texts([named[1]], left - 6, front + h / 2 + 4, 11, TEXT, anchor="end"))
    widths = [left + w + max(right, d), left + w / 2 + text_width(named[0], 11) / 2]
    widths += [text_width(text, size, bold) for text, size, bold in head]
    return "".join(parts), max(widths), front + h + 20
