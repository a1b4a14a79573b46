"""Memory that every rank of a group can access: GPU memory over NVLink, or shared files on a CPU."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rosellm.models.part import Part

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view of memory shared by all ranks; every rank provides the same number of bytes.

    part: this rank's number, and the number of ranks.
    own: this rank's bytes, uint8, initially 0.
    addresses: the addresses of all ranks' bytes in this process, int64 ``[size]``.
    others: the bytes of the remaining ranks, in rank order.
    group: on GPUs, a process group that must live as long as the memory; None on a CPU.
    """

    part: Part
    own: Tensor
    addresses: Tensor
    others: list[Tensor]
    group: dist.ProcessGroup | None = None

    def release(self) -> None:
        """Let kernels of this GPU that wait for a lost rank continue once, with invalid data.

        A kernel waits for one of its own flags to become 1, or for another rank's flag to become 0.
        """
        with torch.cuda.stream(torch.cuda.Stream(self.own.device)):
            self.own.view(torch.int32).fill_(1)
            for theirs in self.others:
                theirs.view(torch.int32).zero_()
            torch.cuda.current_stream().synchronize()


def share_files(store: dist.Store, part: Part, n_bytes: int) -> PeerMemory:
    """Share CPU memory among the ranks by mapping one file per rank; block until all files exist.

    store: the store through which the ranks exchange the files' paths.
    n_bytes: size of each rank's memory.

    The files are unlinked once all ranks have mapped them.
    """
    handle, path = tempfile.mkstemp(prefix="rosellm-", dir=SHARED if SHARED.is_dir() else None)
    os.truncate(handle, n_bytes)
    os.close(handle)
    store.set(f"file-{part.rank}", path)
    paths = [store.get(f"file-{rank}").decode() for rank in range(part.size)]
    mapped = [torch.from_file(one, shared=True, size=n_bytes, dtype=torch.uint8) for one in paths]
    met = store.add("mapped", 1)
    if met == part.size:
        for one in paths:
            os.unlink(one)
    addresses = torch.tensor([one.data_ptr() for one in mapped], dtype=torch.int64)
    return PeerMemory(part, mapped[part.rank], addresses, _others(mapped, part))


def share_gpus(
    store: dist.Store, part: Part, n_bytes: int, device: torch.device, backend: dist.Backend
) -> PeerMemory:
    """Share GPU memory among the ranks through torch's symmetric memory; block until all ranks call it.

    store: the store through which the ranks exchange the memory's handles.
    n_bytes: size of each rank's memory.
    backend: any process-group backend of these ranks; torch requires a group to have one.

    NVLink multicast is not used.
    """
    from torch.distributed._symmetric_memory import _SymmetricMemory as Symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if part.rank == 0:
        store.set("name", f"rosellm-{os.urandom(8).hex()}")
    name = store.get("name").decode()
    Symmetric.set_group_info(name, part.rank, part.size, store)
    group = _registered(name, store, part, backend)  # rendezvous resolves the name to a group
    own = Symmetric.empty_strided_p2p((n_bytes,), (1,), torch.uint8, device, name)
    own.zero_()
    torch.cuda.synchronize(device)
    met = Symmetric.rendezvous(own, name)
    theirs = [met.get_buffer(rank, (n_bytes,), torch.uint8) for rank in range(part.size)]
    addresses = torch.tensor([one.data_ptr() for one in theirs], dtype=torch.int64, device=device)
    return PeerMemory(part, own, addresses, _others(theirs, part), group)


def _registered(name: str, store: dist.Store, part: Part, backend: dist.Backend) -> Any:
    from torch._C import _distributed_c10d

    registry: Any = _distributed_c10d
    group: Any = dist.ProcessGroup(store, part.rank, part.size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)  # noqa: SLF001
    group._set_group_name(name)  # noqa: SLF001
    registry._register_process_group(name, group)  # noqa: SLF001
    return group


def _others(each: list[Tensor], part: Part) -> list[Tensor]:
    return [one for rank, one in enumerate(each) if rank != part.rank]
