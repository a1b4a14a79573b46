"""Draw the KV pool of one layer: its blocks and the block tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rosellm.errors import RoseError
from rosellm.lab.figures.palette import PALETTE, TEXT
from rosellm.roseinfer.exhibits import load_exhibit

svg = load_exhibit("svg")

BLOCK, FREE, HELD = (52, 42), "rgba(127,127,127,0.12)", "#39424e"


class DiagramError(RoseError):
    """A pool that contradicts its block tables."""


def block_pool(
    tables: Mapping[str, Sequence[int]],
    n_blocks: int,
    lengths: Mapping[str, int],
    block_size: int,
    title: str,
) -> svg.Picture:
    """Draw the KV pool of one layer: every block in its owner's colour, filled to the tokens it holds.

    tables: sequence → block indices; lengths: sequence → cached tokens. A block in several tables is striped
    and labelled with their number.
    """
    _check_pool(tables, n_blocks, lengths, block_size)
    owners = {b: [name for name, blocks in tables.items() if b in blocks] for b in range(n_blocks)}
    filled = {b: 0 for b in range(n_blocks)}
    for name, blocks in tables.items():
        for i, block in enumerate(blocks):
            filled[block] = max(filled[block], min(block_size, lengths[name] - i * block_size))
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(tables)}
    columns = min(n_blocks, 12)
    parts = [
        _block(
            b,
            (10 + b % columns * 62, svg.BELOW_TITLE + b // columns * 52),
            [colours[name] for name in owners[b]],
            filled[b] / block_size,
        )
        for b in range(n_blocks)
    ]
    y = svg.BELOW_TITLE + -(-n_blocks // columns) * 52 + 12
    for name, blocks in tables.items():
        parts.append(_table_row(name, blocks, colours[name], y, f"{lengths[name]:,} tokens"))
        y += 26
    width = max(
        [columns * 62 + 12.0, *(_row_width(n, b, f"{lengths[n]:,} tokens") for n, b in tables.items())]
    )
    return svg.picture(
        width, y + 4, title, parts, _pool_in_words(owners, filled, block_size, tables, lengths)
    )


def _check_pool(
    tables: Mapping[str, Sequence[int]], n_blocks: int, lengths: Mapping[str, int], block_size: int
) -> None:
    if n_blocks < 1 or block_size < 1:
        raise DiagramError(f"n_blocks and block_size must be at least 1, not {n_blocks} and {block_size}")
    for name, blocks in tables.items():
        if name not in lengths:
            raise DiagramError(f"the length of {name} is missing: there are {', '.join(lengths) or 'none'}")
        if strange := [b for b in blocks if not 0 <= b < n_blocks]:
            raise DiagramError(f"{name} has block {strange[0]}, but the pool has blocks 0 to {n_blocks - 1}")
        if not (len(blocks) - 1) * block_size < lengths[name] <= len(blocks) * block_size and blocks:
            raise DiagramError(
                f"{name}: {lengths[name]} tokens do not fill {len(blocks)} blocks of {block_size}"
            )


def _block(index: int, at: tuple[float, float], colours: list[str], share: float) -> str:
    (x, y), (w, h) = at, BLOCK
    if not colours:
        return svg.rect(x, y, w, h, 5, FREE, svg.DASHED) + svg.texts(
            [str(index)], x + w / 2, y + 26, 12, TEXT
        )
    stripes = _stripes(colours)
    band = h / len(stripes)
    bands = "".join(svg.rect(x, y + i * band, w * share, band, 0, colour) for i, colour in enumerate(stripes))
    plate = f"{index} ×{len(colours)}" if len(colours) > 1 else str(index)
    width = svg.text_width(plate, 12, bold=True) + 8
    return (
        svg.rect(x, y, w, h, 3, HELD)
        + bands
        + svg.rect(x + w / 2 - width / 2, y + 12, width, 18, 5, HELD)
        + svg.texts([plate], x + w / 2, y + 26, 12, "#ffffff", extra=' font-weight="bold"')
    )


def _stripes(colours: list[str]) -> list[str]:
    """Return a block's horizontal stripes: one for a single owner, at least four for several, in rotation."""
    return colours if len(colours) == 1 else colours * -(-4 // len(colours))


def _table_row(name: str, blocks: Sequence[int], colour: str, y: float, length: str) -> str:
    parts = [
        svg.rect(10, y, 14, 14, 3, colour),
        svg.texts([name], 30, y + 12, 12, TEXT, anchor="start", extra=' font-weight="bold"'),
        svg.texts([length], 38 + svg.text_width(name, 12, True), y + 12, 12, TEXT, anchor="start"),
    ]
    x = 52 + svg.text_width(name, 12, True) + svg.text_width(length, 12)
    for block in blocks:
        width = svg.text_width(str(block), 11) + 12
        parts.append(
            svg.rect(x, y - 2, width, 18, 4, HELD)
            + svg.texts([str(block)], x + width / 2, y + 11, 11, "#ffffff")
        )
        x += width + 4
    return "".join(parts)


def _row_width(name: str, blocks: Sequence[int], length: str) -> float:
    chips = sum(svg.text_width(str(block), 11) + 16 for block in blocks)
    return 60 + svg.text_width(name, 12, True) + svg.text_width(length, 12) + chips


def _pool_in_words(
    owners: dict[int, list[str]],
    filled: dict[int, int],
    block_size: int,
    tables: Mapping[str, Sequence[int]],
    lengths: Mapping[str, int],
) -> str:
    rows = [f"{name}: {lengths[name]:,} tokens in blocks {list(blocks)}" for name, blocks in tables.items()]
    for block, names in owners.items():
        if names:
            more = f", {len(names)} holders" if len(names) > 1 else ""
            rows.append(f"  block {block}: {', '.join(names)}, {filled[block]}/{block_size}{more}")
    free = [str(block) for block, names in owners.items() if not names]
    return "\n".join([*rows, f"  free: {', '.join(free) or 'none'}"])
