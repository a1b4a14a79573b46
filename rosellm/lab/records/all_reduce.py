"""Measure how long an all-reduce between the ranks of one host takes, for each value of ``all_reduce``.

Times the all-reduce of a layer's partial outputs together with the residual and norm that follow, as in a
captured step; the way ``none`` is residual and norm alone. Each way runs in new rank processes, and its sums
are checked before they are timed. The record is DIR/all_reduce.json; ways that the file already contains for
the same commit, ranks and sizes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from rosellm.errors import DeviceError, RoseError
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts
from rosellm.lab.records.records import Results
from rosellm.models.part import Part
from rosellm.roseinfer.kernels.peer_sums import make_sum_add_norm, peer_bytes
from rosellm.roseinfer.kernels.table import TRITON_DEPENDENT, choose_kernels
from rosellm.roseinfer.ranks.collectives import Collectives, connect, listen
from rosellm.roseinfer.ranks.watch import end_with_parent, kill
from rosellm.roseinfer.recipe import LADDER, best_rung, recipe_choices
from rosellm.roseinfer.steps.cuda_graph import Graphs

NAME = "all_reduce"
NONE, LIBRARY = "none", "library"
WAYS = (NONE, *recipe_choices()["all_reduce"])
ROW_BYTES = 8192  # a row of 4,096 values in bf16, as in Llama-3.1-8B
SIZES_KB = (8, 64, 512, 2048)  # 1, 8, 64, 256 rows
PREFILL_KB = {"cuda": 131072, "cpu": 8192}  # 16,384 rows, the largest prefill; on a CPU 1,024
MOST_ONE_SHOT_KB = 2048  # larger sums use the library in every recipe
CALLS = {"cuda": 40, "cpu": 4}  # per measurement; even, since the halves of one_shot's memory alternate
LOOK_S = 0.1
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}

AddNorm = Callable[..., Tensor]


@dataclass(frozen=True)
class Plan:
    """What every rank measures for each way.

    n_ranks: number of ranks.
    device: "cuda" or "cpu".
    sizes_kb: sizes of the summed tensor in KB.
    repeats: measurements per size.
    """

    n_ranks: int
    device: str
    sizes_kb: tuple[int, ...]
    repeats: int

    @property
    def facts(self) -> dict[str, Any]:
        """The settings to record that all ways share."""
        dtype = str(DTYPES[self.device]).removeprefix("torch.")
        told = {"ranks": self.n_ranks, "dtype": dtype, "row_bytes": ROW_BYTES}
        return told | {"calls": CALLS[self.device], "sizes_kb": list(self.sizes_kb)}


def two_gpus(results: Results) -> Results:
    """Return the records of a machine with two GPUs of the model of ``results``."""
    return Results(results.folder.with_name(f"{results.folder.name}-x2"))


def recorded(results: Results) -> dict[str, Any]:
    """Return the figures recorded with two GPUs of the model of ``results``; {} if there are none.

    The entry ``us`` maps way → KB → times as in :func:`measure`.
    """
    pair = two_gpus(results)
    return pair.load(NAME)["figures"] if NAME in pair.names() else {}


def measure(plan: Plan, way: str) -> dict[str, Any]:
    """Time one way to sum: return KB → µs per sum, ``{"median": …, "raw": […]}``.

    way: one of ``WAYS``.

    Each rank is a process with a GPU, or on a CPU with a share of the cores. Raises ``RoseError`` if a sum is
    wrong or a rank fails.
    """
    store, port = listen()
    answers = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(_rank, (port, plan, way, answers), nprocs=plan.n_ranks, join=False, daemon=True)
    found: list[Any] = []
    try:
        while not ranks.join(LOOK_S):  # drain while waiting: the pipe may not hold all answers
            found += [] if answers.empty() else [answers.get()]
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise RoseError(f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}") from None
    finally:
        kill(ranks.processes)
    found += [] if answers.empty() else [answers.get()]
    del store
    return found[0]


@torch.inference_mode()
def _rank(rank: int, port: int, plan: Plan, way: str, answers: Any) -> None:
    end_with_parent(f"rank {rank}: the command exited; shutting down")
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device(plan.device)
    if plan.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // plan.n_ranks))
    part = Part(rank, plan.n_ranks)
    bench = SumBench(Collectives(connect(port), part, device), part, device, way)
    sizes = [kb for kb in plan.sizes_kb if way in (NONE, LIBRARY) or kb <= MOST_ONE_SHOT_KB]
    us = {str(kb): bench.times(kb, plan.repeats) for kb in sizes}
    if rank == 0:
        answers.put(us)


class SumBench:
    """One rank's part in timing one way to sum."""

    def __init__(self, collectives: Collectives, part: Part, device: torch.device, way: str) -> None:
        self._collectives, self._part, self._device, self._way = collectives, part, device, way
        name = "triton" if way == "one_shot" else "auto"
        self._kernels = choose_kernels(name, LADDER[best_rung(device)].launch, device)

    def times(self, kb: int, repeats: int) -> dict[str, Any]:
        """Check and time sums of ``kb`` KB: return the µs per sum of each repeat, and their median."""
        dtype, calls = DTYPES[self._device.type], CALLS[self._device.type]
        rows, width = kb * 1024 // ROW_BYTES, ROW_BYTES // dtype.itemsize
        x = torch.zeros(rows, width, dtype=dtype, device=self._device)
        scale = torch.ones(width, dtype=dtype, device=self._device)
        add_norm = self._make(rows, width, dtype)
        norm = {"bias": None, "scale": scale, "shift": None, "eps": 1e-5}
        for _ in range(2):  # both halves of one_shot's memory
            add_norm(x=x, delta=torch.full_like(x[None], self._part.rank + 1), **norm)
        self._check(x)
        run = partial(add_norm, x=x, delta=torch.zeros_like(x[None]), **norm)

        def several() -> None:
            for _ in range(calls):
                run()

        if self._device.type == "cuda":
            replay = Graphs().capture(several, lambda: (run(), run()))
            self._collectives.least(0)
        else:
            replay = several
        raw = [self._us(replay) / calls for _ in range(repeats)]
        return {"median": median(raw), "raw": raw}

    def _make(self, rows: int, width: int, dtype: torch.dtype) -> AddNorm:
        """Return the function to time: sum, residual and norm, as in the layers of a sharded model."""
        add_norm, sums = self._kernels.add_norm, self._collectives
        if self._way == "one_shot":
            n_bytes = peer_bytes(rows, width, dtype.itemsize, self._part.size)
            return make_sum_add_norm(sums.peers(n_bytes), rows, self._kernels is TRITON_DEPENDENT)
        if self._way == NONE:
            return add_norm
        return lambda *, x, delta, **norm: add_norm(x=x, delta=sums.summed(delta), **norm)

    def _check(self, x: Tensor) -> None:
        n = self._part.size
        wanted = 2 * (self._part.rank + 1 if self._way == NONE else n * (n + 1) // 2)
        if not (x == wanted).all():
            value = f"{x.flatten()[0]:g}"
            raise RoseError(f"all_reduce={self._way} of {x.nbytes} bytes gives {value}, not {wanted}")

    def _us(self, replay: Callable[[], object]) -> float:
        """Return the µs of one call of ``replay``, after an untimed call that synchronises the ranks."""
        replay()
        if self._device.type == "cpu":
            began = perf_counter()
            replay()
            return (perf_counter() - began) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def record(asked: Asked) -> Iterator[Record]:
    """Measure the ways one after the other; print the medians of each."""
    plan = plan_of(asked)

    def told(way: str, times: dict[str, Any]) -> str:
        return f"{way}: " + ", ".join(f"{kb} KB {one['median']:.1f} µs" for kb, one in times.items())

    ways = asked["all_reduce"] or (WAYS[1:] if asked.device == "cuda" else (LIBRARY,))
    parts = {way: partial(measure, plan, way) for way in (NONE, *ways)}
    begun = asked.record(NAME, figures={**plan.facts, "us": {}})
    yield from in_parts(asked, begun, parts, told, "us", WAYS.index)


def plan_of(asked: Asked) -> Plan:
    """Return what to measure; raise ``DeviceError`` if there are fewer GPUs than ranks."""
    there = torch.cuda.device_count() if asked.device == "cuda" else None
    n_ranks = asked["ranks"] or there or 2
    if there is not None and not 2 <= n_ranks <= there:
        raise DeviceError(f"{max(2, n_ranks)} ranks need as many GPUs; this machine has {there}")
    return Plan(n_ranks, asked.device, (*SIZES_KB, PREFILL_KB[asked.device]), asked["repeats"])


DEFAULTS = {"ranks": None, "all_reduce": (), "repeats": 30}
EXPERIMENTS = [Experiment(NAME, record, DEFAULTS, model=None, refuse=plan_of)]
