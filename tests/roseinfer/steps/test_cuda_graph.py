"""CUDA graphs: captured whatever other threads do meanwhile."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from rosellm.roseinfer.steps.cuda_graph import record_graph


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


def test_captures_are_recorded_in_thread_local_error_mode(monkeypatch):
    modes = []

    class Graph:
        def capture_begin(self, capture_error_mode="global", **_options):
            modes.append(capture_error_mode)

        def __enter__(self):
            return self

        def __exit__(self, *_exception):
            return None

        wait_stream = capture_end = replay = lambda self, *_arguments: None

    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: Graph())
    monkeypatch.setattr("rosellm.roseinfer.steps.cuda_graph._capture_stream", Graph)
    assert record_graph(lambda: 1, None)() == 1
    assert modes == ["thread_local"]
