"""Memory that every rank of a group can access: GPU memory over NVLink, or shared files on a CPU."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rosellm.errors import DeviceError
from rosellm.models.part import Part

SHARED = Path("/dev/shm")
FULL = 255  # a byte with all bits set


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view of memory shared by all ranks; every rank provides the same number of bytes.

    part: this rank's number, and the number of ranks.
    own: this rank's bytes, uint8, initially with all bits set.
    addresses: the addresses of all ranks' bytes in this process, int64 ``[size]``.
    mapped: the bytes of all ranks, on a CPU.
    zeros: as many zeros in pinned memory, on GPUs.
    """

    part: Part
    own: Tensor
    addresses: Tensor
    mapped: list[Tensor] = field(default_factory=list)
    zeros: Tensor | None = None

    def release(self) -> None:
        """Let kernels of this GPU that wait for a lost rank continue once, with invalid data.

        A kernel waits until words of its own memory have other values than the initial one. They are copied,
        since a kernel would find no room while waiting kernels fill the GPU.
        """
        assert self.zeros is not None
        beside = torch.cuda.Stream(self.own.device, priority=-1)  # none that a waiting kernel blocks
        with torch.inference_mode(), torch.cuda.stream(beside):
            self.own.copy_(self.zeros, non_blocking=True)
            torch.cuda.current_stream().synchronize()


def share_files(store: dist.Store, part: Part, n_bytes: int, met: Callable[[], object]) -> PeerMemory:
    """Share CPU memory among the ranks by mapping one file per rank.

    store: the store through which the ranks exchange the files' paths.
    n_bytes: size of each rank's memory.
    met: waits until all ranks have called it, and raises an error if one ends before.
    """
    handle, path = tempfile.mkstemp(prefix="rosellm-", dir=SHARED if SHARED.is_dir() else None)
    try:
        os.truncate(handle, n_bytes)
        os.close(handle)
        store.set(f"file-{part.rank}", path)
        met()
        paths = [store.get(f"file-{rank}").decode() for rank in range(part.size)]
        mapped = [torch.from_file(one, shared=True, size=n_bytes, dtype=torch.uint8) for one in paths]
        mapped[part.rank].fill_(FULL)
        met()
    finally:
        os.unlink(path)
    addresses = torch.tensor([one.data_ptr() for one in mapped], dtype=torch.int64, device="cpu")
    return PeerMemory(part, mapped[part.rank], addresses, mapped)


def share_gpus(
    store: dist.Store, part: Part, n_bytes: int, met: Callable[[], object], device: torch.device
) -> PeerMemory:
    """Share GPU memory among the ranks by handles of CUDA's driver.

    store: the store through which the ranks exchange the handles.
    n_bytes, met: as in :func:`share_files`.

    Torch's symmetric memory counts the exchanges of a process, so that a process that has shared memory
    before and a new one would wait for each other for ever.
    """
    with torch.cuda.device(device):
        own = torch.full((n_bytes,), FULL, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        handle, offset = _exported(own.data_ptr())
        store.set(f"memory-{part.rank}", f"{offset} {handle.hex()}")
        met()
        theirs = [store.get(f"memory-{rank}").decode().split() for rank in range(part.size)]
        others = [one for rank, one in enumerate(theirs) if rank != part.rank]
        bases = [_opened(bytes.fromhex(handle)) for _, handle in others]
        met()
    weakref.finalize(own, _close, bases, own.device).atexit = False
    addresses = [base + int(offset) for base, (offset, _) in zip(bases, others, strict=True)]
    addresses.insert(part.rank, own.data_ptr())
    zeros = torch.zeros(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return PeerMemory(part, own, torch.tensor(addresses, device=device), zeros=zeros)


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``: names memory of a GPU to other processes."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver; raise ``DeviceError`` if it fails."""
    if code := getattr(_driver(), name)(*arguments):
        raise DeviceError(
            f"GPUs cannot share memory ({name} fails with CUDA's error {code}): unset "
            "PYTORCH_CUDA_ALLOC_CONF, or use a recipe with all_reduce='library'"
        )


def _exported(address: int) -> tuple[bytes, int]:
    """Return the handle of the allocation that contains ``address``, and the offset of ``address`` in it."""
    base, size, handle, place = ctypes.c_uint64(), ctypes.c_size_t(), _Handle(), ctypes.c_uint64(address)
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), place)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), address - base.value


def _opened(handle: bytes) -> int:
    """Map another process's memory to the current device; return its address."""
    address, enable_peer_access = ctypes.c_uint64(), ctypes.c_uint(1)
    _call(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), enable_peer_access
    )
    return address.value


def _close(bases: list[int], device: torch.device) -> None:
    with torch.cuda.device(device), suppress(DeviceError):  # the other process may have ended
        for base in bases:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))
