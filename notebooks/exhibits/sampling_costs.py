"""What sampling adds to a recorded decode step, beside the bytes that it moves."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from rosellm.lab.records.records import Results
from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.steps.logprob_ring import SIZES

GREEDY = load_exhibit("sampling_steps").GREEDY
SHAPES = {"gpt2": KNOWN_SHAPES["gpt2"], "Qwen3-0.6B": KNOWN_SHAPES["Qwen/Qwen3-0.6B"]}


def recorded_modes(results: Results) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return model → batch → mode → µs per step of each turn, for every model with a record."""
    return {
        model: {
            int(batch): {mode: one["turns_us"] for mode, one in modes.items()}
            for batch, modes in record["figures"]["batches"].items()
        }
        for model, record in results.by_model("sampling_steps").items()
    }


def extra_bytes(arch: Arch, batch: int) -> dict[str, int]:
    """Return mode → bytes that a step of ``batch`` rows moves in addition to a greedy one.

    Weights have 16 bits, logits and counts 32. Tile maxima and reads of few tiles are omitted.
    """
    row, head = 4 * arch.vocab_size, 2 * arch.vocab_size * arch.d_model
    runs = -(-batch // SIZES[-1])  # logprobs; each reads the head's weights again
    return {
        "temperature": 0,
        "top-p": 2 * batch * row,  # logits: written, read to sum those above the drawn token
        "top-k, top-p": batch * row,  # written
        "+ penalties": 2 * batch * row,  # and counts are read
        "logprobs": runs * head + 2 * batch * row,  # logits: written, read
        "top-k, top-p: one row": row,
        "logprobs: one row": head + 2 * row,
    }


def extra_us(turns_us: Mapping[str, list[float]]) -> dict[str, float]:
    """Return mode → µs by which the median step exceeds the greedy one."""
    greedy = median(turns_us[GREEDY])
    return {mode: median(turns) - greedy for mode, turns in turns_us.items() if mode != GREEDY}
