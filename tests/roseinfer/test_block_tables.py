"""Block tables and the staging buffer: equal tables by both ways, in the promised number of copies."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rosellm.roseinfer.block_tables import BUILD_RANGE, H2D_RANGE, TABLES
from rosellm.roseinfer.kv_append import FreshIndices, ReusedIndices
from rosellm.roseinfer.staging import StagingBuffer

LAYERS, POOL, WIDTH = 3, 20, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_ids(lengths: list[int], seed: int = 0) -> list[list[list[int]]]:
    """Global block ids ``[layer][row]``."""
    rng = random.Random(seed)
    return [
        [[layer * POOL + rng.randrange(POOL) for _ in range(n)] for n in lengths] for layer in range(LAYERS)
    ]


def make_tables(variant: str, device: str):
    return TABLES[variant](torch.device(device), WIDTH, POOL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", TABLES)
def test_a_table_holds_each_rows_block_indices_within_its_layers_pool(variant, device):
    tables = make_tables(variant, device)
    for seed, lengths in enumerate([[1, 3, 2], [WIDTH], [0, 4], [1] * 9, [0, 0], [2, 1]]):
        ids = random_ids(lengths, seed)
        staged = tables.stage(ids)
        assert len(staged) == LAYERS
        for layer, table in enumerate(staged):
            assert (table.shape, table.dtype) == ((len(lengths), WIDTH), torch.int32)
            assert table.device.type == device and table.is_contiguous()
            for row, wanted in zip(table.tolist(), ids[layer], strict=True):
                assert row[: len(wanted)] == [i - layer * POOL for i in wanted]
                assert all(0 <= i < POOL for i in row)


@pytest.mark.parametrize("variant", TABLES)
def test_staging_again_leaves_earlier_tables_alone(variant):
    tables = make_tables(variant, "cpu")
    first = tables.stage(random_ids([2, 3], seed=1))
    before = [table.clone() for table in first]
    tables.stage(random_ids([2, 3], seed=2))
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


def test_staging_leaves_the_callers_lists_alone():
    ids = random_ids([2, 3])
    make_tables("pinned", "cpu").stage(ids)
    assert ids == random_ids([2, 3])


@pytest.mark.parametrize("variant", TABLES)
def test_building_and_copying_are_two_profiler_ranges(variant):
    tables = make_tables(variant, "cpu")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        tables.stage(random_ids([2, 3]))
    names = [event.name for event in trace.events()]
    assert (names.count(BUILD_RANGE), names.count(H2D_RANGE)) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "copies"), [("per_layer", LAYERS), ("pinned", 1)])
def test_host_to_device_copies_are_one_a_layer_or_one_in_all(variant, copies):
    tables = make_tables(variant, "cuda")
    tables.stage(random_ids([2, 3]))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        tables.stage(random_ids([2, 3]))
        torch.cuda.synchronize()
    assert sum("Memcpy HtoD" in event.name for event in trace.events()) == copies


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


def test_a_staging_buffer_sends_into_the_front_of_a_given_tensor():
    staging, target = StagingBuffer(torch.device("cpu"), torch.int32), torch.full((5,), -1, dtype=torch.int32)
    staging.host(1, 3)[:] = 7
    sent = staging.send(target)
    assert sent.shape == (1, 3) and sent.data_ptr() == target.data_ptr()
    assert target.tolist() == [7, 7, 7, -1, -1]


@pytest.mark.gpu
def test_a_staging_buffer_on_a_gpu_is_pinned_and_its_copies_keep_their_values():
    staging = StagingBuffer(torch.device("cuda"), torch.int32)
    sent = []
    for i in range(50):
        staging.host(1 << 20)[:] = i
        sent.append(staging.send())
    assert staging._host.is_pinned()
    assert [(int(t.min()), int(t.max())) for t in sent] == [(i, i) for i in range(50)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("indices", [FreshIndices, ReusedIndices])
def test_index_lists_become_device_tensors(indices, dtype, device):
    send = indices(torch.device(device), dtype)
    for rows in ([[1, 2, 3], [4, 5, 6]], [[7]], [list(range(40))] * 5, [[8, 9]]):
        tensors = send(iter(rows))
        assert [t.tolist() for t in tensors] == rows
        assert all(t.dtype == dtype and t.device.type == device and t.is_contiguous() for t in tensors)


def test_reused_indices_keep_their_device_buffer_and_fresh_ones_do_not_share():
    reused, fresh = (kind(torch.device("cpu"), torch.int32) for kind in (ReusedIndices, FreshIndices))
    assert reused([[1, 2]])[0].data_ptr() == reused([[3, 4]])[0].data_ptr()
    first, second = fresh([[1, 2]]), fresh([[3, 4]])
    assert first[0].tolist() == [1, 2] and second[0].tolist() == [3, 4]


@pytest.mark.gpu
def test_reused_indices_take_one_copy():
    reused = ReusedIndices(torch.device("cuda"), torch.int32)
    reused([[1, 2]] * 6)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        reused([[3, 4]] * 6)
        torch.cuda.synchronize()
    assert sum("Memcpy HtoD" in event.name for event in trace.events()) == 1
