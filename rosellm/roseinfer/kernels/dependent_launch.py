"""Programmatic dependent launch: a kernel starts while its predecessor still runs, and waits for it by
itself.

Launched with ``launch_pdl=True``, a kernel may begin once every program of its predecessor has called
:func:`launch_dependents` or ended; what it does before :func:`wait_for_predecessor` overlaps with the
predecessor's work, and from there on all of that is visible. Every kernel of a chain waits first and only
then releases its successor, so whichever runs, all kernels but its direct predecessor have ended: what was
written two or more kernels ago may be read before the wait, what the predecessor writes may not, and nothing
may be written before it. (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

from __future__ import annotations

from rosellm.triton_or_none import tl, triton

AT_END = 2  # of ``dependent``, else True or False: a program releases the successor as it ends


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Returns once the predecessor has ended; nothing where the launch is an ordinary one."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents(DEPENDENT: tl.constexpr):
    """Lets the successor start; nothing where the launch is an ordinary one, or releases it ``AT_END``."""
    if DEPENDENT == 1:
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(dependent: int) -> dict[str, bool]:
    """What a kernel's launch needs besides its ``DEPENDENT`` constant."""
    return {"launch_pdl": True} if dependent else {}
