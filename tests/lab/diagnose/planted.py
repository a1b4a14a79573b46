"""A made-up profile of a step in which nothing is wrong, and changes of it in which one thing is."""

from dataclasses import replace

import torch

from rosellm.lab.diagnose.ceilings import Ceilings
from rosellm.lab.diagnose.profile import Profile
from rosellm.lab.diagnose.steps import Work
from rosellm.lab.records.account import Row
from rosellm.lab.records.host_functions import HostFunction

CEILINGS = Ceilings(
    read_bytes_per_us=1e6, copy_bytes_per_us=8e5, flops_per_us=1e9, call_us=2.0, read_size=2**30
)
WORK = Work(8, 256, torch.float16, torch.device("cpu"), n_weights=10**6, n_matrices=20, kv_bytes=5e6)


def shares(work: float, copies: float = 0.0, gap: str = "between kernels") -> tuple[Row, ...]:
    """Rows of a step of 1,000 µs; what is neither work nor copies is idle."""
    kinds = [("GEMM", "work", work), ("copy HtoD", "copies", copies), (gap, "gaps", 1 - work - copies)]
    return tuple(Row(cause, kind, share * 1e3, share, 1.0) for cause, kind, share in kinds if share)


def profile(on_gpu: bool = False, **changes) -> Profile:
    work = replace(WORK, device=torch.device("cuda")) if on_gpu else WORK
    sound = Profile(
        name="planted",
        work=work,
        ceilings=CEILINGS,
        step_us=1000.0,
        stretched=1.0,
        rows=shares(1.0),
        functions=(HostFunction("`loop.slow`", 300.0, 5), HostFunction("`loop.fast`", 10.0, 5)),
        calls=50.0,
        waits=1.0,
        waits_share=0.0,
        copied_share=0.0,
        copying="",
        allocated=1e6,
        products=20.0,
        computed=work.flops,
    )
    return replace(sound, **changes)
