"""The staging buffer: reused, and never rewritten while a copy of it is under way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rosellm.roseinfer.cache.staging import StagingBuffer

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


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


@pytest.mark.gpu
def test_a_staging_buffer_on_a_gpu_is_pinned_and_its_copies_keep_their_values():
    staging = StagingBuffer(torch.device("cuda:0"), torch.int32)
    sent = []
    for i in range(50):
        staging.host(1 << 20)[:] = i
        sent.append(staging.send())
    assert staging._taken.is_pinned()
    assert [(int(t.min()), int(t.max())) for t in sent] == [(i, i) for i in range(50)]
