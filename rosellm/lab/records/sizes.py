"""The size of a measurement: whole workloads on a GPU, a few rows and tokens on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rosellm.bench.workloads import WORKLOADS, Workload
from rosellm.lab.records import lengths, step_records
from rosellm.lab.records.records import FULL_SIZE
from rosellm.lab.records.step_records import STEP_WORKLOADS

LEDGER_WORKLOADS = STEP_WORKLOADS
GRID_CONTEXTS = (64, 256, 512, 1000)
LONGEST_TUNED = 960
LEDGER_ROOM, STEPS_ROOM = 64, 14  # decoded tokens, and some to spare


@dataclass(frozen=True)
class Size:
    """Upper limits of a measurement: rows per batch, requests, new tokens, prompt tokens.

    Records contain its name.
    """

    rows: int
    requests: int
    new_tokens: int
    prompt: int
    name: str = "own"

    @property
    def effort(self) -> dict[str, Any]:
        """For step times: engines, and seconds of measured steps per rung over all engines."""
        return {"engines": 3, "seconds": 1.0} if self.rows == MANY else {"engines": 1, "seconds": 0.02}

    def of(self, workload: Workload) -> Workload:
        """Return the workload, capped to this size."""
        w, tokens = workload, workload.prompt_tokens
        if w.min_new_tokens is not None:
            w = replace(w, min_new_tokens=min(w.min_new_tokens, self.new_tokens))
        if w.min_prompt_tokens is not None:
            w = replace(w, min_prompt_tokens=min(w.min_prompt_tokens, self.prompt))
        return replace(
            w,
            num_requests=min(w.num_requests, self.requests),
            max_new_tokens=min(w.max_new_tokens, self.new_tokens),
            max_batch_size=min(w.max_batch_size, self.rows),
            prompt_tokens=None if tokens is None else min(tokens, self.prompt),
            shared_prefix_tokens=min(w.shared_prefix_tokens, self.prompt),
        )

    def options(self, workload: Workload) -> dict[str, Any]:
        """Return a benchmark command's options for the workload, capped to this size."""
        whole, sized = workload.flags(), self.of(workload).flags()
        smaller = {key: value for key, value in sized.items() if value != whole[key]}
        return {"--workload": workload.id} | {
            f"--{key.replace('_', '-')}": value for key, value in smaller.items()
        }

    def batches(self, *wanted: int) -> list[int]:
        """Return the batch sizes that fit; the largest allowed if none does."""
        return [n for n in wanted if n <= self.rows] or [self.rows]

    def contexts(self, *wanted: int) -> list[int]:
        return [n for n in wanted if n <= self.prompt] or [self.prompt]


MANY = 1 << 20
WHOLE = Size(MANY, MANY, MANY, MANY, FULL_SIZE)
SMALL = Size(rows=4, requests=6, new_tokens=8, prompt=96, name="small")
SIZES = {size.name: size for size in (WHOLE, SMALL)}


def positions_needed(size: Size) -> dict[str, int]:
    """Return experiment → the longest sequence length; experiments on the shipped model are omitted."""
    sized = {name: size.of(workload) for name, workload in WORKLOADS.items()}
    prompts = {name: w.shared_prefix_tokens + (w.prompt_tokens or 1) for name, w in sized.items()}
    whole = {name: prompts[name] + w.max_new_tokens for name, w in sized.items()}
    half = {name: whole[name] - w.max_new_tokens // 2 + LEDGER_ROOM for name, w in sized.items()}
    unequal = lengths.positions_for(min(lengths.MEAN, size.prompt // lengths.TIMES))
    return {
        "counts": 8 + min(32, size.new_tokens),
        "autotune": min(LONGEST_TUNED, size.prompt),
        "ledger": max(half[name] for name in LEDGER_WORKLOADS),
        "ledger_w6": half["W6"],
        "ledger_w8": half["W8"],
        "grid": max(size.contexts(*GRID_CONTEXTS)) + STEPS_ROOM,
        "timelines": half["W1"],
        "kv_pressure": max(whole["W6"], whole["W7"]),
        "determinism": max(whole.values()),
        **{f"lengths-{batch}": unequal for batch in lengths.BATCHES},
        **{f"leave_one_out-{name}": whole[name] for name in step_records.WHOLE_RUNS},
        **{f"{kind}-{name}": half[name] for kind in ("steps", "ablations") for name in LEDGER_WORKLOADS},
    }
