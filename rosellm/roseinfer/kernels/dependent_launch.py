"""Programmatic dependent launch: a kernel starts while its predecessor runs, and waits for it explicitly.

Launched with ``launch_pdl=True``, a kernel may start once every program of its predecessor has called
:func:`launch_dependents` or exited. What it does before :func:`wait_for_predecessor` overlaps with the
predecessor; after that call, all of the predecessor's writes are visible. Most kernels of a chain wait before
they release their successor. When that starts, all kernels before its predecessor have thus ended. Before the
wait, it may read what those kernels wrote, but it must neither read what its predecessor writes, nor write
anything. (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)

Norms, also with a sum over ranks, and the quantisation release their successor first. It is a quantisation, a
GEMM or the head, which may start before the kernel two places ahead of it has ended: before its wait, it
reads nothing but weights and temperatures, which it thus has more time to load.
"""

from __future__ import annotations

from rosellm.triton_or_none import tl, triton

AT_END = 2  # a third value of ``dependent``: release the successor only as the program ends


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Wait until the predecessor has ended; a no-op in an ordinary launch."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents(DEPENDENT: tl.constexpr):
    """Let the successor start; a no-op in an ordinary launch, and with ``AT_END``."""
    if DEPENDENT == 1:
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(dependent: int) -> dict[str, int]:
    """Return a kernel's ``DEPENDENT`` constant and the launch options that go with it.

    dependent: 0 for an ordinary launch, 1 for programmatic dependent launch, or ``AT_END``.
    """
    return {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
