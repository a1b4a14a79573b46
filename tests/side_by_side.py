"""How a notebook's cell shows the records of every machine."""

import re

METHODS = (
    "print_table", "each_machine", "recorded", "predict", "outcome", "verdict", "ablation", "timeline",
    "waterfall",
)  # fmt: skip
SIDE_BY_SIDE = re.compile(rf"\b(?:nb|mixed|epilogue)\.(?:(?:{'|'.join(METHODS)})\(|(?:machines|others)\b)")
