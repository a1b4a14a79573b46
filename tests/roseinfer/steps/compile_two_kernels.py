"""Compiles two kernels ahead for an H200, without a GPU: ``compile_two_kernels SECONDS``.

What would launch a kernel takes SECONDS to build. Standard output is a list of what was built, and whether
the main thread built it. A process of its own, because Triton's interpreter, once it has called a function
within a kernel, leaves the language patched, and nothing compiles.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from time import sleep
from types import SimpleNamespace

import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget

from rosellm.roseinfer.kernels.compile_ahead import compile_ahead


@triton.jit
def one_more_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 1)


def main(seconds: float) -> None:
    built: list[tuple[str, str, bool]] = []

    def build(src, metadata) -> None:
        sleep(seconds)
        in_main = threading.current_thread() is threading.main_thread()
        built.append((src.fn.__name__, metadata.name, in_main))

    target = GPUTarget("cuda", 90, 32)
    current = {"device": lambda: 0, "stream": lambda device: 0, "target": lambda: target}
    stand_in = {f"get_current_{what}": get for what, get in current.items()}
    triton.runtime.driver.set_active(SimpleNamespace(**stand_in, launcher_cls=build))
    x = torch.zeros(32)

    def launch(size: int) -> None:
        one_more_kernel[(1,)](x, SIZE=size)

    compile_ahead([partial(launch, size) for size in (16, 32, 16)])
    print(json.dumps(built))


if __name__ == "__main__":
    main(float(sys.argv[1]))
