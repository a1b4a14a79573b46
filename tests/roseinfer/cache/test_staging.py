"""The staging buffer: reused and never rewritten while a copy of it is under way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rosellm.roseinfer.cache.staging import MOST_BUFFERS, StagingBuffer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_staging_buffer_is_reused_and_grows(device):
    staging = StagingBuffer(torch.device(device), torch.int32)
    addresses = []
    for shape in ((2, 3), (6,), (1, 1), (4, 5), (20,)):
        values = np.arange(np.prod(shape)).reshape(shape)
        host = staging.host(*shape)
        host[:] = values
        addresses.append(host.__array_interface__["data"][0])
        assert staging.send().cpu().numpy().tolist() == values.tolist()
    assert len(set(addresses[:3])) == len(set(addresses[3:])) == 1


class LateEvent:
    """An event of a device that is behind: what was recorded has finished once ``now`` says so."""

    now = 0
    recorded = 0

    def record(self) -> None:
        LateEvent.recorded += 1
        self.number = LateEvent.recorded

    def query(self) -> bool:
        return self.number <= LateEvent.now

    def synchronize(self) -> None:
        LateEvent.now = max(LateEvent.now, self.number)


@pytest.fixture
def late(monkeypatch) -> StagingBuffer:
    """A buffer of a device that is behind."""
    monkeypatch.setattr(LateEvent, "now", 0)
    monkeypatch.setattr(LateEvent, "recorded", 0)
    staging = StagingBuffer(torch.device("cpu"), torch.int32)
    staging._new_event = LateEvent
    return staging


def test_a_staging_buffer_waits_for_no_copy_under_way_unless_too_many_are_and_rewrites_none(late):
    under_way = []
    for i in range(MOST_BUFFERS):
        late.host(3)[:] = i
        late.send()
        under_way.append(late._taken)
    assert late.waits == 0
    assert [buffer[:3].tolist() for buffer in under_way] == [[i] * 3 for i in range(MOST_BUFFERS)]
    late.host(3)[:] = -1
    assert late.waits == 1 and LateEvent.now == 1 and under_way[0][:3].tolist() == [-1] * 3
    LateEvent.now = LateEvent.recorded
    first = late.host(3).__array_interface__["data"][0]
    assert late.waits == 1 and first == under_way[1].data_ptr()


@pytest.mark.gpu
def test_a_staging_buffer_on_a_gpu_is_pinned_and_its_copies_keep_their_values():
    staging = StagingBuffer(torch.device("cuda"), torch.int32)
    sent = []
    for i in range(50):
        staging.host(1 << 20)[:] = i
        sent.append(staging.send())
    assert staging._taken.is_pinned()
    assert [(int(t.min()), int(t.max())) for t in sent] == [(i, i) for i in range(50)]
