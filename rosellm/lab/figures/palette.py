"""The palette of all figures: colours and hatchings that are legible on light and dark pages."""

from __future__ import annotations

from typing import Any

# Distinct under deuteranopia, protanopia and tritanopia; contrast of 2.2 or more with white and #111111.
BLUE, ORANGE, GREEN = "#366fae", "#f35e01", "#1fa46f"
SKY, MAGENTA, VIOLET, PALE = "#1da7ff", "#ae2e69", "#8a42ff", "#9db2bc"
PEACH = "#f78b42"  # only next to orange
PALETTE = (BLUE, ORANGE, GREEN, SKY, MAGENTA, VIOLET, PALE)
TEXT, GRID, INK, PAPER = "#7a7f87", "rgba(127,127,127,0.25)", "#10151c", "#ffffff"
HATCHING = {"fillmode": "overlay", "fgcolor": INK, "fgopacity": 0.35, "size": 6, "solidity": 0.25}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")

# Colour and hatching of each part of a decode step, in all charts.
PARTS = {
    "the step": (PALE, "-"),
    "reserve": (PALE, "\\"),
    "build_block_tables": (VIOLET, "-"),
    "h2d_block_tables": (SKY, "-"),
    "stage_tokens": (SKY, "\\"),
    "build_mask": (MAGENTA, "-"),
    "model": (BLUE, "-"),
    "kv_append": (ORANGE, "-"),
    "sample": (GREEN, "-"),
    "commit": (PALE, "+"),
}
# Colour and hatching of each cause of a ledger. A timeline draws parts and causes, so all styles differ.
CAUSES = {
    "inputs": (SKY, "/"),
    "mask": (ORANGE, "/"),
    "embedding": (MAGENTA, "/"),
    "norm": (VIOLET, ""),
    "layers": (BLUE, "x"),
    "GEMM": (BLUE, ""),
    "attention": (GREEN, ""),
    "append": (ORANGE, ""),
    "elementwise": (VIOLET, "/"),
    "views": (GREEN, "/"),
    "head": (BLUE, "/"),
    "sampling": (MAGENTA, ""),
    "all-reduce": (ORANGE, "x"),
    "all-gather": (ORANGE, "\\"),
    "copies": (SKY, ""),
    "other": (PALE, "x"),
    "between kernels": (PALE, ""),
    "launch latency": (PALE, "."),
    "synchronisation": (PALE, "|"),
    "host": (PALE, "/"),
}
STYLES = PARTS | CAUSES


def fill(colour: str, hatch: str) -> dict[str, Any]:
    return {"color": colour, "pattern": HATCHING | {"shape": hatch}} if hatch else {"color": colour}
