"""All-reduce, residual and norm in one kernel, over memory that the ranks share: reference and kernel.

Each rank writes its rows straight into every other rank's memory, adds up all ranks' rows in rank order, so
that all ranks obtain the same bits, and empties the memory again ("one shot": every rank receives
everything). There are no flags: a word that has all bits set has not arrived yet, so that a row takes one
trip over NVLink, not three (as in TensorRT-LLM's all-reduce for low latency). Each program handles one row
and waits only for that row of the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.norm import add_norm_ref, load_affine, normed
from rosellm.roseinfer.kernels.quantize import warps_of
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_sum_add_norm_kernel": "norm"}
HALVES = 2  # halves of the memory, used alternately: a rank is at most one sum ahead of another


def peer_bytes(rows: int, width: int, itemsize: int, n_ranks: int) -> int:
    """Return the bytes of memory that each rank shares for sums of up to ``rows`` rows.

    Each of the two halves has ``[n_ranks, rows, width]`` elements: the rows that each rank sends.
    """
    return HALVES * n_ranks * rows * width * itemsize


def sum_add_norm_ref(*, partial: Tensor, x: Tensor, **norm) -> Tensor:
    """Add all ranks' partial sums ``[ranks, P, M, C]`` to x, and return the norm of x (torch reference).

    Each rank adds up its own P partial sums and rounds them to x's dtype, in which ranks exchange them.

    norm: the other arguments of ``norm.add_norm_ref``.
    """
    return add_norm_ref(x=x, delta=partial.float().sum(dim=1).to(x.dtype), **norm)


@triton.jit
def slot_of(
    address, rank, row, half, C: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, word: tl.constexpr
):
    """Return a pointer to the row from ``rank`` in the memory at ``address``, marked as 16-byte-aligned.

    word: the integer type of a row's elements.
    """
    memory = tl.multiple_of(address.to(tl.pointer_type(word)), 16)
    return memory + ((half * RANKS + rank) * ROWS + row) * C


@triton.jit
def received(place, inside):
    """Wait until all words of a row have arrived; return them, and empty the memory."""
    words = tl.load(place, mask=inside, other=0, volatile=True)
    while tl.max((words == -1).to(tl.int32), axis=0) > 0:
        words = tl.load(place, mask=inside, other=0, volatile=True)
    tl.store(place, tl.full(words.shape, -1, words.dtype), mask=inside)
    return words


@triton.jit(do_not_specialize=["M", "half"])
def _sum_add_norm_kernel(
    y_ptr, addresses_ptr, x_ptr, bias_ptr, scale_ptr, shift_ptr, out_ptr, eps, M, half,
    C: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, SHIFT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All-reduce, add and normalise one row per program.

    addresses_ptr: ``[RANKS]``, the address of each rank's shared memory, with ROWS rows per rank and half.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.primitive_bitwidth == 32 else tl.int16
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < C
    scale, shift, added = load_affine(scale_ptr, shift_ptr, bias_ptr, c, inside, WIDTH, SHIFT, BIAS)
    addresses = ()  # type: tuple
    for rank in tl.static_range(RANKS):
        addresses = addresses + (tl.load(addresses_ptr + rank),)
    launch_dependents(DEPENDENT)  # the GEMM that follows may load its first weights while this waits
    wait_for_predecessor(DEPENDENT)
    y = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(y_ptr + (part * M + row) * C + c, mask=inside, other=0.0).to(tl.float32)
    sent = y.to(dtype).to(word, bitcast=True)
    sent = tl.where(sent == -1, -2, sent).to(word)  # another NaN
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(slot_of(addresses[rank], RANK, row, half, C, ROWS, RANKS, word) + c, sent, mask=inside)
    x = tl.load(x_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += sent.to(dtype, bitcast=True).to(tl.float32)
        else:
            theirs = received(slot_of(addresses[RANK], rank, row, half, C, ROWS, RANKS, word) + c, inside)
            total += theirs.to(dtype, bitcast=True).to(tl.float32)
    rounded = (x + (total + added)).to(dtype)
    tl.store(x_ptr + row * C + c, rounded, mask=inside)
    out = normed(rounded.to(tl.float32), inside, scale, shift, eps, C, SHIFT)
    tl.store(out_ptr + row * C + c, out.to(out_ptr.dtype.element_ty), mask=inside)


def make_sum_add_norm(peers: PeerMemory, most_rows: int, dependent: int = False) -> Callable[..., Tensor]:
    """Return a function like ``norm.add_norm`` that first all-reduces ``delta``, in the same kernel.

    peers: shared memory of the size that :func:`peer_bytes` returns for ``most_rows`` rows.
    most_rows: maximum of M in a call.
    dependent: the launch mode, as in ``launch_options``.

    Each rank passes its partial sums ``[P, M, C]`` as ``delta``; all tensors must be contiguous. All ranks
    must make the same calls, and an even number of them in any captured graph, because the two halves of the
    shared memory alternate.
    """
    launch, turn = launch_options(dependent), [0]
    ranks = {"RANK": peers.part.rank, "RANKS": peers.part.size, "ROWS": most_rows}

    def sum_add_norm(*, x, delta, bias=None, scale, shift, eps) -> Tensor:
        rows, width = x.shape
        half = turn[0]
        turn[0] = (half + 1) % HALVES
        out = x.new_empty(rows, width)
        padded = next_power_of_2(width)
        given = {"PARTS": len(delta), "BIAS": bias is not None, "SHIFT": shift is not None}
        bias, shift = (x if it is None else it for it in (bias, shift))
        _sum_add_norm_kernel[(rows,)](
            delta, peers.addresses, x, bias, scale, shift, out, eps, rows, half,
            C=width, WIDTH=padded, **given, **ranks, num_warps=warps_of(rows, padded), **launch,
        )  # fmt: skip
        return out

    return sum_add_norm
