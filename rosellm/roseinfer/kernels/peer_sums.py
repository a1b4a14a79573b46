"""All-reduce, residual and norm in one kernel, over memory that the ranks share: reference and kernel.

Each rank stores its partial sums where the other ranks can read them, and sets flags. It then adds all
partial sums in rank order, so that all ranks obtain the same bits ("one shot": every rank reads everything).
Each program handles one row and waits only for that row's programs on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.norm import add_norm_ref, load_affine, normed
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_sum_add_norm_kernel": "norm"}
HALVES = 2  # halves of the memory, used alternately: a rank is at most one sum ahead of another
FLAG_BYTES = 4


def peer_bytes(rows: int, width: int, itemsize: int, n_ranks: int) -> int:
    """Return the bytes of memory that each rank shares for sums of up to ``rows`` rows.

    Each of the two halves has a flag per row and rank, then the rows.
    """
    return HALVES * _half_bytes(rows, width, itemsize, n_ranks)


def _flags_end(rows: int, n_ranks: int) -> int:
    return -(-rows * n_ranks * FLAG_BYTES // 128) * 128


def _half_bytes(rows: int, width: int, itemsize: int, n_ranks: int) -> int:
    return _flags_end(rows, n_ranks) + -(-rows * width * itemsize // 128) * 128


def sum_add_norm_ref(*, partial: Tensor, x: Tensor, **norm) -> Tensor:
    """Add all ranks' partial sums ``[ranks, M, C]`` to x, and return the norm of x (torch reference).

    norm: the other arguments of ``norm.add_norm_ref``.
    """
    return add_norm_ref(x=x, delta=partial, **norm)


@triton.jit
def rows_of(address, rows_at, like_ptr):
    """Return a pointer to the rows in a rank's memory, of the type of like_ptr and marked as 16-byte-aligned.

    address: the start of the rank's memory. rows_at: byte offset of the rows.
    """
    return tl.multiple_of((address + rows_at).to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def _sum_add_norm_kernel(
    y_ptr, addresses_ptr, x_ptr, bias_ptr, scale_ptr, shift_ptr, out_ptr, eps, flags_at, rows_at,
    C: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BIAS: tl.constexpr,
    SHIFT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All-reduce, add and normalise one row per program.

    addresses_ptr: ``[RANKS]``, the address of each rank's shared memory.
    flags_at, rows_at: byte offsets of flags and rows in each rank's memory.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < C
    scale, shift, added = load_affine(scale_ptr, shift_ptr, bias_ptr, c, inside, WIDTH, SHIFT, BIAS)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    own = tl.load(addresses_ptr + RANK)
    y = tl.load(y_ptr + row * C + c, mask=inside, other=0.0)
    tl.store(rows_of(own, rows_at, y_ptr) + row * C + c, y, mask=inside)
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:  # a flag is 1 after its row is stored, until its reader resets it
            flags = (tl.load(addresses_ptr + rank) + flags_at).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(flags + row * RANKS + RANK, 0, 1, sem="release", scope="sys") != 0:
                pass
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flags = (own + flags_at).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(flags + row * RANKS + rank, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()
    total = tl.zeros((WIDTH,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += y.to(tl.float32)
        else:
            theirs = rows_of(tl.load(addresses_ptr + rank), rows_at, y_ptr) + row * C + c
            total += tl.load(theirs, mask=inside, other=0.0, volatile=True).to(tl.float32)
    x = tl.load(x_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
    rounded = (x + (total + added)).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * C + c, rounded, mask=inside)
    out = normed(rounded.to(tl.float32), inside, scale, shift, eps, C, SHIFT)
    tl.store(out_ptr + row * C + c, out.to(out_ptr.dtype.element_ty), mask=inside)


def make_sum_add_norm(peers: PeerMemory, most_rows: int, dependent: int = False) -> Callable[..., Tensor]:
    """Return a function like ``norm.add_norm`` that first all-reduces ``delta``, in the same kernel.

    peers: shared memory of the size that :func:`peer_bytes` returns for ``most_rows`` rows.
    most_rows: maximum of M in a call.
    dependent: the launch mode, as in ``launch_options``.

    Each rank passes its partial sum ``[1, M, C]`` as ``delta``; all tensors must be contiguous. All ranks
    must make the same calls, and an even number of them in any captured graph, because the two halves of the
    shared memory alternate.
    """
    launch, turn = launch_options(dependent), [0]
    rank, n_ranks = peers.part.rank, peers.part.size

    def sum_add_norm(*, x, delta, bias=None, scale, shift, eps) -> Tensor:
        rows, width = x.shape
        half = turn[0] * _half_bytes(most_rows, width, x.dtype.itemsize, n_ranks)
        turn[0] = (turn[0] + 1) % HALVES
        places = half, half + _flags_end(most_rows, n_ranks)
        out = x.new_empty(rows, width)
        padded = next_power_of_2(width)
        given = {"BIAS": bias is not None, "SHIFT": shift is not None, "RANK": rank, "RANKS": n_ranks}
        bias, shift = (x if it is None else it for it in (bias, shift))
        options = {"num_warps": max(1, min(16, padded // 256)), **launch}
        _sum_add_norm_kernel[(rows,)](
            delta, peers.addresses, x, bias, scale, shift, out, eps, *places,
            C=width, WIDTH=padded, **given, **options,
        )  # fmt: skip
        return out

    return sum_add_norm
