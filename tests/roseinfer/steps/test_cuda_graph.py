"""CUDA graphs: captured whatever other threads do meanwhile."""

from __future__ import annotations

import gc
import weakref
from threading import Event, Thread

import pytest
import torch

from rosellm.errors import OptionError
from rosellm.roseinfer.steps.cuda_graph import _IDLE, Graphs, graphs_on


def test_an_allocator_without_memory_pools_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(OptionError, match="native allocator; PYTORCH_CUDA_ALLOC_CONF chose cudaMallocAsync$"):
        graphs_on(torch.device("cuda"))


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
    replay = Graphs().capture(run, run)
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
    held = Circle(Graphs().capture(lambda: x + 1, None))
    gone = weakref.ref(held)
    del held

    def run() -> torch.Tensor:
        many = [[i] for i in range(20 * gc.get_threshold()[0])]  # enough for a collection
        return x + len(many[0])

    assert Graphs().capture(run, None)().tolist() == [1] * 4
    gc.collect()
    assert gone() is None


@pytest.fixture
def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a GEMM for which cuBLAS uses its workspace."""
    x, weight = (torch.randn(n, 1 << 16, device="cuda", dtype=torch.bfloat16) for n in (8, 512))
    return x, weight.t()


def others() -> list[torch.Tensor]:
    return [torch.zeros(size << 20, dtype=torch.uint8, device="cuda") for size in (32, 8, 4, 1) * 2]


@pytest.mark.gpu
def test_a_captured_gemm_writes_no_memory_that_others_got_after_cublas_workspaces_were_freed(factors):
    """``torch.compile(mode="reduce-overhead")`` frees them."""
    graphs, (x, weight) = Graphs(), factors
    replay = graphs.capture(lambda: x @ weight, None)
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(graphs._side.stream):
        of_others = others()
    torch.cuda.synchronize()
    of_others += others()
    torch.testing.assert_close(replay(), x @ weight)
    assert not any(one.any() for one in of_others)


@pytest.mark.gpu
def test_the_workspace_of_a_users_graph_stays_when_we_capture(factors):
    x, weight = factors
    mine, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(mine):
        x @ weight
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=mine):
            y = x @ weight
        Graphs().capture(lambda: x @ weight, None)()
        of_others = others()
        graph.replay()
        torch.cuda.synchronize()
    torch.testing.assert_close(y, x @ weight)
    assert not any(one.any() for one in of_others)


@pytest.mark.gpu
def test_graphs_that_exist_at_once_have_workspaces_of_their_own_and_later_ones_take_those_of_the_gone(
    factors,
):
    x, weight = factors
    first, second = Graphs(), Graphs()
    replays = [graphs.capture(lambda: x @ weight, None) for graphs in (first, second, first)]
    assert first._side is not second._side
    torch.testing.assert_close([replay() for replay in replays], [x @ weight] * 3)
    left = first._side
    del first
    gc.collect()
    assert left not in _IDLE[torch.cuda.current_device()]  # its replays are held
    del replays
    gc.collect()
    assert left in _IDLE[torch.cuda.current_device()]
