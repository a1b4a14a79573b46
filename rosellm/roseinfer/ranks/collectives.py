"""Collectives among the ranks of one host, with ``torch.distributed``: NCCL on GPUs, gloo on a CPU.

Process groups belong to an engine, not to the process, so each of several engines may have its own. All
sockets listen on the loopback interface only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rosellm.models.part import Part
from rosellm.roseinfer.ranks.peer_memory import PeerMemory, share_files, share_gpus

LOOPBACK = "127.0.0.1"
RELEASED_WITHIN_S, RELEASED_EVERY_S = 10.0, 1e-4
PATIENCE = timedelta(minutes=30)  # ``watch`` detects dead and hung ranks


def listen() -> tuple[dist.TCPStore, int]:
    """Start the store through which the ranks find each other; return the store and its port."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, None, True, PATIENCE, wait_for_workers=False, master_listen_fd=free.detach()
        )
    return store, port


def connect(port: int) -> dist.TCPStore:
    """Return a connection to rank 0's store, which listens on ``port``."""
    return dist.TCPStore(LOOPBACK, port, None, False, PATIENCE, wait_for_workers=False)


class Collectives:
    """Collectives of the ranks; all ranks must make the same calls in the same order.

    The constructor blocks until all ranks have called it.

    store: the store through which the ranks find each other.
    part: this rank's number, and the number of ranks.
    device: this rank's device.
    """

    def __init__(self, store: dist.Store, part: Part, device: torch.device) -> None:
        self._store, self._part, self._device, self._size = store, part, device, part.size
        self._peers: dict[int, PeerMemory] = {}
        self._gloo: Any = _gloo(dist.PrefixStore("gloo", store), part)
        self._on_device = self._gloo
        if device.type == "cuda":
            self._on_device = _nccl(dist.PrefixStore("nccl", store), part)
            self._stream = torch.cuda.current_stream(device)
            self.summed(
                torch.zeros(1, dtype=torch.float32, device=device)
            )  # creates the communicator before any capture
            torch.cuda.synchronize(device)

    def summed(self, x: Tensor) -> Tensor:
        """Sum the ranks' contiguous tensors in place, on the current stream (all-reduce); return ``x``."""
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _wait(self._on_device.allreduce([x], options))
        return x

    def gathered(self, x: Tensor) -> Tensor:
        """Gather the ranks' contiguous tensors, in rank order: ``[size, *x.shape]`` (all-gather).

        This calls a private method, since ``dist.all_gather_into_tensor`` works only with process-wide
        groups.
        """
        out = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self._on_device._allgather_base(out, x, options))  # noqa: SLF001
        return out.view(self._size, *x.shape)

    def least(self, number: int) -> int:
        """Return the minimum of the ranks' numbers, exchanged through gloo on the host."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        numbers = torch.tensor([number], device="cpu")
        _wait(self._gloo.allreduce([numbers], options))
        return int(numbers)

    def peers(self, n_bytes: int) -> PeerMemory:
        """Return ``n_bytes`` of memory per rank that all ranks share; all ranks must call it.

        Calls with the same ``n_bytes`` return the same memory.
        """
        if n_bytes not in self._peers:
            store = dist.PrefixStore(f"peers-{n_bytes}", self._store)
            share: Callable[..., PeerMemory] = share_files
            if self._device.type == "cuda":
                share = partial(share_gpus, device=self._device)
            self._peers[n_bytes] = share(store, self._part, n_bytes, met=lambda: self.least(0))
        return self._peers[n_bytes]

    def abort(self) -> None:
        """Abort collectives that wait for lost ranks, in any thread; the object is unusable afterwards.

        NCCL's abort returns only after every graph that captured the communicator has been destroyed.
        """
        if self._on_device is self._gloo:  # its connections close with the other ranks' processes
            return
        Thread(target=self._release, daemon=True).start()
        self._on_device.abort()

    def _release(self) -> None:
        """Let sums of steps that have started end: some come after NCCL's, which end by its abort."""
        late = monotonic() + RELEASED_WITHIN_S
        while self._peers and monotonic() < late and not self._stream.query():
            for peers in self._peers.values():
                peers.release()
            sleep(RELEASED_EVERY_S)


def _wait(work: Any) -> None:
    if work is not None:  # None: the work was put on the current stream
        work.wait()


def _gloo(store: dist.Store, part: Part) -> Any:
    """Return a gloo group for one engine; only gloo's private options can bind it to the loopback."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=LOOPBACK)]  # noqa: SLF001
    options._timeout = PATIENCE  # noqa: SLF001
    return gloo(store, part.rank, part.size, options)


def _nccl(store: dist.Store, part: Part) -> Any:
    """Return an NCCL group for one engine; the loss of a rank does not end this process."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which not every host's NVLink supports
    for ends_the_process in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING"):
        os.environ.setdefault(f"TORCH_NCCL_{ends_the_process}", "0")
    options = c10d.ProcessGroupNCCL.Options()
    return c10d.ProcessGroupNCCL(store, part.rank, part.size, options)
