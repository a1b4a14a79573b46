"""Tensor parallelism: one engine on several GPUs of a host, or in several processes on a CPU.

This process is rank 0. It starts the other ranks as processes. Each of them loads its part of the model,
builds the same engine on it, and then runs the calls that rank 0's engine sends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import RLock
from time import sleep
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from tqdm import tqdm

from rosellm.errors import DeviceError, OptionError, describe
from rosellm.frozen_heap import frozen_heap
from rosellm.models.checkpoint import SHIPPED, draft_for
from rosellm.models.loading import AnyTokenizer, arch_of, load_parts, resolve_device
from rosellm.models.model import Transformer
from rosellm.models.part import WHOLE, Part
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.table import Kernels, choose_kernels
from rosellm.roseinfer.ranks.collectives import Collectives, connect, listen
from rosellm.roseinfer.ranks.members import Follower, Leader
from rosellm.roseinfer.ranks.watch import Beats, Watch, join, kill, watch_rank_0
from rosellm.roseinfer.recipe import LADDER, get_rung, speculating
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.resident import ResidentStep

MOST_RANKS = 64
SUMS_A_LAYER = 2
SUM_US, READ_MB_PER_US = 4.3, 4.3  # of H200s: what a sum adds to a step of Llama-3.1-8B, and reads
ENDS_WITHIN_S = 3.0


@dataclass(frozen=True)
class Load:
    """The arguments of ``loading.load_parts``, with which every rank loads its own part."""

    model: str = SHIPPED
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    tokenizer: str | None = None
    quantization: str | None = None
    calibration: str | list[str] | None = None

    def part(self, part: Part) -> tuple[Transformer, AnyTokenizer]:
        """Load one rank's part of the model, and the tokenizer."""
        given = self.model, self.device, self.dtype, self.load_format
        return load_parts(*given, part, self.tokenizer, self.quantization, self.calibration)


def load_engine(
    model: str = SHIPPED,
    *,
    tensor_parallel_size: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    load_format: str = "auto",
    tokenizer: str | None = None,
    quantization: str | None = None,
    calibration: str | list[str] | None = None,
    speculation: str | None = None,
    draft_model: str | None = None,
    **options: Any,
) -> Engine:
    """Load a model on ``tensor_parallel_size`` ranks, and build one engine on them, as ``Engine.load`` does.

    speculation: changes the recipe as ``recipe.speculating`` does, unless it is None.
    draft_model: the model that drafts, for "draft"; None means the one that ships with a shipped model.
    options: options of ``Engine``.

    On GPUs, rank r uses GPU r; on a CPU, the ranks share its cores. The other ranks end with the engine. If
    the model cannot be sharded or a device is missing, raises ``OptionError``, ``DeviceError`` or
    ``RecipeError`` before any process starts. If a rank fails, now or whenever the engine is used, raises
    ``RankError``.
    """
    load = Load(model, device, dtype, load_format, tokenizer, quantization, calibration)
    rung = LADDER.get(chosen, chosen) if isinstance(chosen := options.get("recipe"), str) else chosen
    proposer = speculation or getattr(rung, "speculation", None)
    draft = draft_for(model, proposer, draft_model)
    if speculation is not None:
        recipe = speculating(options.get("recipe"), speculation, resolve_device(device))
        options |= {"recipe": recipe}
    kinds = options.get("recipe"), options.get("deterministic", False), options.get("kernels", "auto")
    check_ranks(tensor_parallel_size, load, *kinds)
    if tensor_parallel_size == 1:
        return Engine.load(**asdict(load), draft_model=draft, **options)
    loaded = load_ranks(tensor_parallel_size, load, *kinds)
    if loaded.model.device.type == "cuda" and (line := slower_line(loaded.model, tensor_parallel_size)):
        warnings.warn(line, stacklevel=2)
    return loaded.build(loaded.model, loaded.tokenizer, **options)


def slower_line(model: Transformer, n_ranks: int) -> str | None:
    """Return a line that says that one GPU probably decodes faster than ``n_ranks``; None if it does not.

    It does if reading only a part of a layer saves less time than the sums take, as measured on H200s.
    Contexts, which are cut as well, are not counted.

    model: the model, or one rank's part of it.
    """
    megabytes = model.whole.n_layer_parameters * model.dtype.itemsize / 1e6
    saved_us = megabytes * (1 - 1 / n_ranks) / READ_MB_PER_US
    if saved_us >= SUMS_A_LAYER * SUM_US:
        return None
    return (
        f"one GPU probably decodes faster than tensor_parallel_size={n_ranks}: per layer, reading fewer "
        f"weights saves about {saved_us:.0f} us, but {SUMS_A_LAYER} sums take about "
        f"{SUMS_A_LAYER * SUM_US:.0f} us (on H200s)"
    )


class Loaded(NamedTuple):
    """A model that is ready to become an engine.

    build: makes the engine from model, tokenizer and options, as ``Engine`` does.
    model: the model, or rank 0's part of it.
    tokenizer: the model's tokenizer.
    """

    build: Callable[..., Engine]
    model: Transformer
    tokenizer: AnyTokenizer


def load_ranks(
    n_ranks: int,
    load: Load,
    recipe: str | Rung | None = None,
    deterministic: bool = False,
    kernels: str | Kernels = "auto",
) -> Loaded:
    """Load the model on ``n_ranks`` ranks that will form one engine; raise the errors of :func:`load_engine`.

    recipe, deterministic, kernels: options of that engine, checked before any rank starts.
    """
    check_ranks(n_ranks, load, recipe, deterministic, kernels)
    if n_ranks == 1:
        return Loaded(Engine, *load.part(WHOLE))
    leader = start_ranks(n_ranks, load)
    with leader.guarded():
        return Loaded(partial(build_engine, leader), *load.part(leader.part))


def check_ranks(
    n_ranks: int,
    load: Load,
    recipe: str | Rung | None,
    deterministic: bool = False,
    kernels: str | Kernels = "auto",
) -> None:
    """Raise the error of :func:`load_engine` if ``n_ranks`` ranks cannot run this model and recipe."""
    _check_count(n_ranks)
    if n_ranks == 1:
        return
    if load.quantization or arch_of(load.model, load.load_format).quantization:
        raise OptionError("weights are quantised on one GPU; leave out quantization or tensor_parallel_size")
    device = resolve_device(load.device)
    if device.type == "cuda" and n_ranks > torch.cuda.device_count():
        raise DeviceError(
            f"tensor_parallel_size {n_ranks} needs as many GPUs; this machine has {torch.cuda.device_count()}"
        )
    if device.type == "cuda" and torch.cuda.current_device() != 0:
        raise DeviceError(f"rank 0 has GPU 0; the current device is {torch.cuda.current_device()}")
    chosen = recipe if isinstance(recipe, Rung) else LADDER[get_rung(recipe, device)]
    (chosen.invariant() if deterministic else chosen).check_ranks(n_ranks)
    chosen.check_sums(device, choose_kernels(kernels, chosen.launch, device).name)
    Part(0, n_ranks).check(arch_of(load.model, load.load_format))


def check_cut(n_ranks: int, model: str, load_format: str) -> None:
    """Raise ``OptionError`` if the model cannot be sharded over ``n_ranks`` ranks on any device."""
    _check_count(n_ranks)
    Part(0, n_ranks).check(arch_of(model, load_format))


def _check_count(n_ranks: int) -> None:
    if not isinstance(n_ranks, int) or isinstance(n_ranks, bool) or not 1 <= n_ranks <= MOST_RANKS:
        raise OptionError(
            f"tensor_parallel_size is {describe(n_ranks)}; it must be a whole number from 1 to {MOST_RANKS}"
        )


def start_ranks(n_ranks: int, load: Load) -> Leader:
    """Start the other ranks, which load their parts; return rank 0's ``Leader`` once all have connected."""
    device = resolve_device(load.device)
    store, port = listen()
    context = mp.get_context("spawn")
    beats = context.RawArray(ctypes.c_int64, n_ranks)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with _spawning():
        for rank in range(1, n_ranks):
            ours, theirs = context.Pipe()
            seat = _Seat(Part(rank, n_ranks), theirs, beats, port)
            process = context.Process(target=_work, args=(seat, load), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
    watch = Watch(processes, pipes, beats, lambda: leader.abort())
    leader = Leader(Part(0, n_ranks), pipes, watch, partial(_end, processes, pipes))
    watch.start()
    with leader.guarded():
        while not all(beats[1:]):
            leader.check()
            sleep(0.01)
        leader.collectives = Collectives(store, leader.part, device)
    return leader


def build_engine(leader: Leader, *parts: Any, **options: Any) -> Engine:
    """Build every rank's engine on its part of the model, and return rank 0's engine.

    parts: rank 0's part of the model, and the tokenizer.
    options: options of every rank's ``Engine``.
    """
    leader.send(options | {"warm_up": False})  # rank 0's engine makes them warm up
    with leader.guarded():
        engine = Engine(*parts, **options, group=leader)
    graphs = engine.step.worker.graphs if isinstance(engine.step, ResidentStep) else None
    weakref.finalize(engine, _close, leader, graphs, os.getpid())
    return engine


def _close(leader: Leader, graphs: Graphs | None, process: int) -> None:
    """End the other ranks; destroy the graphs before the NCCL communicator that they captured.

    Has no effect in a process other than ``process``, such as a fork of it that exits.
    """
    if os.getpid() != process:
        return
    leader.close()
    if graphs is not None:
        graphs.reset()
        leader.abort()


@dataclass(frozen=True)
class _Seat:
    """The data with which a rank other than 0 is started.

    part: the rank's part of the model.
    pipe: the connection to rank 0.
    beats: the heartbeat counters of all ranks.
    port: the port of rank 0's store.
    """

    part: Part
    pipe: Connection
    beats: Beats
    port: int


def _work(seat: _Seat, load: Load) -> None:
    """Run a rank other than 0; this is the main function of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; rank 0 handles it
    tqdm.set_lock(RLock())  # the default is a semaphore, which a killed process would leak
    try:
        follower = Follower(seat.part, seat.pipe)
        watch_rank_0(seat.beats, seat.part.rank, lambda: follower.is_busy, lambda: follower.is_waiting)
        _follow(follower, seat, load)
    except BaseException as error:
        with suppress(OSError):  # rank 0 may have closed the pipe for the same reason
            seat.pipe.send_bytes(describe(error).encode())
        os._exit(1)
    os._exit(0)  # skip exit handlers of libraries, which may wait for other ranks


@torch.inference_mode()
def _follow(follower: Follower, seat: _Seat, load: Load) -> None:
    device = resolve_device(load.device)
    if device.type == "cuda":
        torch.cuda.set_device(seat.part.rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // seat.part.size))
    follower.collectives = Collectives(connect(seat.port), seat.part, device)
    model, _ = load.part(seat.part)
    engine = Engine(model, None, **follower.receive(), group=follower)
    with frozen_heap():
        assert isinstance(engine.step, ResidentStep)
        follower.follow(engine.step.worker.call)
    del engine


@contextmanager
def _spawning() -> Iterator[None]:
    """Spawn processes that do not import the program's main module and show no progress bars.

    They run only functions of this package, so a script needs no ``__main__`` guard.
    """
    main, bars = sys.modules["__main__"], os.environ.get("TQDM_DISABLE")
    sys.modules["__main__"], os.environ["TQDM_DISABLE"] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if bars is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = bars


def _end(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    """Close the pipes, and kill the processes that do not exit within ``ENDS_WITHIN_S`` seconds."""
    for pipe in pipes:
        pipe.close()
    join(processes, ENDS_WITHIN_S)
    kill(processes)
