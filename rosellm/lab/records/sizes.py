"""The size of a measurement: whole workloads on a GPU, few sequences and tokens on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rosellm.bench.workloads import Workload
from rosellm.lab.records.records import FULL_SIZE


@dataclass(frozen=True)
class Size:
    """Upper limits of a measurement.

    rows: sequences per batch.
    requests: requests of a workload.
    new_tokens, prompt: generated tokens, and prompt tokens, of a request.
    name: the size's name in records.
    """

    rows: int
    requests: int
    new_tokens: int
    prompt: int
    name: str = "own"

    @property
    def effort(self) -> dict[str, Any]:
        """Arguments of ``measure_steps``: number of engines, and seconds of measured steps per rung."""
        return {"engines": 3, "seconds": 0.3} if self.rows == MANY else {"engines": 1, "seconds": 0.02}

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
        """Return those of the batch sizes that are within the limit, or the limit if none is."""
        return [n for n in wanted if n <= self.rows] or [self.rows]

    def contexts(self, *wanted: int) -> list[int]:
        """Return those of the context lengths that are within the limit, or the limit if none is."""
        return [n for n in wanted if n <= self.prompt] or [self.prompt]


MANY = 1 << 20
WHOLE = Size(MANY, MANY, MANY, MANY, FULL_SIZE)
SMALL = Size(rows=4, requests=6, new_tokens=8, prompt=96, name="small")
SIZES = {size.name: size for size in (WHOLE, SMALL)}
