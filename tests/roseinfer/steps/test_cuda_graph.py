"""CUDA graphs: captured whatever other threads do meanwhile."""

from __future__ import annotations

import gc
import weakref
from threading import Event, Thread

import pytest
import torch

from rosellm.roseinfer.steps.cuda_graph import _capture_stream, record_graph


@pytest.mark.gpu
def test_a_capture_is_not_spoiled_by_what_another_thread_calls():
    capturing, called = Event(), Event()

    def other_thread() -> None:
        capturing.wait(10)
        torch.empty(1 << 20, pin_memory=True)  # calls that a capture in global mode forbids to every thread
        torch.cuda.Event().query()
        torch.cuda.mem_get_info()
        torch.empty((64 << 20) + 7, dtype=torch.uint8, device="cuda")
        called.set()

    x = torch.zeros(4, device="cuda")

    def run() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            capturing.set()
            assert called.wait(10)
        return x + 1

    thread = Thread(target=other_thread)
    thread.start()
    replay = record_graph(run, run)
    thread.join()
    x.fill_(5)
    assert replay().tolist() == [6] * 4


class Circle:
    """Garbage that only a collection finds."""

    def __init__(self, held: object) -> None:
        self.me, self.held = self, held


@pytest.mark.gpu
def test_a_capture_is_not_spoiled_by_garbage_that_holds_graphs():
    x = torch.zeros(4, device="cuda")
    held = Circle(record_graph(lambda: x + 1, None))
    gone = weakref.ref(held)
    del held

    def run() -> torch.Tensor:
        many = [[i] for i in range(20 * gc.get_threshold()[0])]  # enough for a collection
        return x + len(many[0])

    assert record_graph(run, None)().tolist() == [1] * 4
    gc.collect()
    assert gone() is None


@pytest.mark.gpu
def test_a_captured_gemm_writes_no_memory_that_others_got_after_cublas_workspaces_were_freed():
    """``torch.compile(mode="reduce-overhead")`` frees them."""
    x, weight = (torch.randn(n, 1 << 16, device="cuda", dtype=torch.bfloat16) for n in (8, 512))
    replay = record_graph(lambda: x @ weight.t(), lambda: x @ weight.t())
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        others = [torch.zeros(size << 20, dtype=torch.uint8, device="cuda") for size in (32, 8, 4, 1) * 2]
    torch.cuda.synchronize()
    torch.testing.assert_close(replay(), x @ weight.t())
    assert not any(one.any() for one in others)
