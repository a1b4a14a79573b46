"""Block tables and the staging buffer: equal tables by every way, in the promised number of copies."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from rosellm.roseinfer.cache.block_tables import BUILD_RANGE, H2D_RANGE, TABLES
from rosellm.roseinfer.steps.kv_append import FreshIndices, ReusedIndices
from torch.profiler import ProfilerActivity, profile

from rosellm.roseinfer.cache.staging import MOST_BUFFERS, StagingBuffer

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


@pytest.mark.parametrize("variant", ["per_layer", "pinned"])
def test_staging_again_leaves_earlier_tables_alone(variant):
    tables = make_tables(variant, "cpu")
    first = tables.stage(random_ids([2, 3], seed=1))
    before = [table.clone() for table in first]
    tables.stage(random_ids([2, 3], seed=2))
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


@pytest.mark.parametrize("variant", TABLES)
def test_staging_leaves_the_callers_lists_alone(variant):
    ids = random_ids([2, 3])
    make_tables(variant, "cpu").stage(ids)
    assert ids == random_ids([2, 3])


@pytest.mark.parametrize("variant", TABLES)
def test_building_and_copying_are_two_profiler_ranges(variant):
    tables = make_tables(variant, "cpu")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        tables.stage(random_ids([2, 3]))
    names = [event.name for event in trace.events()]
    assert (names.count(BUILD_RANGE), names.count(H2D_RANGE)) == (1, 1)


def device_work(tables, ids: list[list[list[int]]]) -> list[str]:
    """Names of the kernels and copies that staging ``ids`` takes on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        tables.stage(ids)
        torch.cuda.synchronize()
    on_device = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in on_device if name not in (BUILD_RANGE, H2D_RANGE)]


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "copies"), [("per_layer", LAYERS), ("pinned", 1)])
def test_host_to_device_copies_are_one_a_layer_or_one_in_all(variant, copies):
    tables = make_tables(variant, "cuda")
    tables.stage(random_ids([2, 3]))
    assert sum("Memcpy HtoD" in name for name in device_work(tables, random_ids([2, 3]))) == copies


@pytest.mark.gpu
def test_resident_tables_take_one_copy_and_one_kernel_for_changed_rows_and_nothing_for_unchanged_ones():
    tables, ids = make_tables("resident", "cuda"), random_ids([2, 3, 1])
    tables.stage(ids)
    grow(ids, 1)
    work = device_work(tables, ids)
    assert len(work) == 2 and sum("Memcpy HtoD" in name for name in work) == 1
    assert device_work(tables, ids) == []


def grow(ids: list[list[list[int]]], row: int) -> None:
    """One more block for a row, in every pool."""
    for pool, rows in enumerate(ids):
        rows[row].append(pool * POOL + 7)


class Sends:
    """Counts what a staging buffer sends, in elements; may fail the next time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.broken = False
        send = StagingBuffer.send

        def counted(staging: StagingBuffer, *out) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("the copy failed")
            sent = send(staging, *out)
            self.sizes.append(sent.numel())
            return sent

        monkeypatch.setattr(StagingBuffer, "send", counted)


ROW = 2 + LAYERS * WIDTH  # int32 elements that one changed row takes: its number, and its table in every pool


@pytest.fixture
def sends(monkeypatch) -> Sends:
    return Sends(monkeypatch)


def test_resident_tables_send_the_changed_rows_of_all_pools_in_one_copy_and_nothing_else(sends):
    tables, ids = make_tables("resident", "cpu"), random_ids([2, 3, 1, 4])
    tables.stage(ids)
    tables.stage(ids)
    assert sends.sizes == [4 * ROW]
    grow(ids, 1)
    grow(ids, 3)
    tables.stage(ids)
    tables.stage([list(rows) for rows in ids])
    assert sends.sizes == [4 * ROW, 2 * ROW]


def test_unchanged_resident_rows_run_nothing_on_the_device():
    tables, ids = make_tables("resident", "cpu"), random_ids([2, 3])
    tables.stage(ids)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        tables.stage(ids)
    names = {event.name for event in trace.events()}
    assert {BUILD_RANGE, H2D_RANGE} <= names
    views = {"aten::slice", "aten::alias", "aten::as_strided"}
    assert names <= {BUILD_RANGE, H2D_RANGE} | views


def clone_last(ids):
    for rows in ids:
        rows[1][-1] ^= 1


def refill(ids):
    for pool, rows in enumerate(ids):
        rows[1][:] = [pool * POOL + 3, pool * POOL + 4, rows[1][-1]]


def put_another(ids):
    for mine, other in zip(ids, random_ids([3, 3], seed=9), strict=True):
        mine[1] = other[1]


def swap(ids):
    for rows in ids:
        rows[1], rows[2] = rows[2], rows[1]


def change_last_pool(ids):
    ids[-1][1][0] ^= 1


def shorten(ids):
    for rows in ids:
        del rows[1][-1]


@pytest.mark.parametrize(
    "change",
    [lambda ids: grow(ids, 1), clone_last, refill, put_another, swap, change_last_pool, shorten],
    ids=["grown", "clone", "refilled", "another_list", "swapped", "one_pool_only", "shortened"],
)
def test_any_change_of_a_resident_row_is_noticed(change, sends):
    tables, ids = make_tables("resident", "cpu"), random_ids([2, 3, 3])
    tables.stage(ids)
    change(ids)
    staged = tables.stage(ids)
    assert torch.equal(staged, make_tables("pinned", "cpu").stage(ids))
    assert sends.sizes[1] == (2 if change is swap else 1) * ROW


def test_a_resident_row_that_was_out_of_the_batch_for_a_while_is_right_when_it_returns(sends):
    tables, ids = make_tables("resident", "cpu"), random_ids([2, 3, 1])
    tables.stage(ids)
    tables.stage([rows[:1] for rows in ids])
    tables.stage(ids)
    assert sends.sizes == [3 * ROW]
    grow(ids, 2)
    tables.stage([rows[:2] for rows in ids])
    assert torch.equal(tables.stage(ids), make_tables("pinned", "cpu").stage(ids))


def test_resident_rows_whose_copy_failed_are_sent_again(sends):
    tables, ids = make_tables("resident", "cpu"), random_ids([2, 3])
    tables.stage(ids)
    grow(ids, 0)
    sends.broken = True
    with pytest.raises(RuntimeError, match="the copy failed"):
        tables.stage(ids)
    sends.broken = False
    assert torch.equal(tables.stage(ids), make_tables("pinned", "cpu").stage(ids))


def test_resident_tables_stay_in_one_buffer_that_grows_with_the_batch():
    tables = make_tables("resident", "cpu")
    addresses = [tables.stage(random_ids([1] * n, seed=n)).data_ptr() for n in (4, 2, 4, 5, 8, 3)]
    assert len(set(addresses[:3])) == len(set(addresses[3:])) == 1
    assert addresses[0] != addresses[3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pools", [1, LAYERS])
@pytest.mark.parametrize("seed", range(3))
def test_resident_tables_equal_pinned_ones_through_random_changes(pools, seed, device):
    rng = random.Random(seed)
    resident, pinned = make_tables("resident", device), make_tables("pinned", device)
    sequences: list[list[list[int]]] = []  # [sequence][pool]
    for _ in range(150):
        kind = rng.choice(["start", "start", "end", "grow", "grow", "clone", "shuffle", "refill"])
        if kind == "start" or not sequences:
            sequences.append([[pool * POOL + rng.randrange(POOL)] for pool in range(pools)])
        one = rng.choice(sequences)
        for pool, ids in enumerate(one):
            if kind == "grow" and len(ids) < WIDTH:
                ids.append(pool * POOL + rng.randrange(POOL))
            if kind == "clone":
                ids[-1] = pool * POOL + rng.randrange(POOL)
            if kind == "refill":
                ids[:] = [pool * POOL + rng.randrange(POOL) for _ in ids]
        if kind == "end" and len(sequences) > 1:
            sequences.remove(one)
        if kind == "shuffle":
            rng.shuffle(sequences)
        staged = [[one[pool] for one in sequences] for pool in range(pools)]
        assert torch.equal(resident.stage(staged), pinned.stage(staged))


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


def test_a_staging_buffer_waits_for_no_copy_under_way_unless_too_many_are_and_rewrites_none(monkeypatch):
    monkeypatch.setattr(LateEvent, "now", 0)
    monkeypatch.setattr(LateEvent, "recorded", 0)
    staging = StagingBuffer(torch.device("cpu"), torch.int32)
    staging._new_event = LateEvent
    under_way = []
    for i in range(MOST_BUFFERS):
        staging.host(3)[:] = i
        staging.send()
        under_way.append(staging._taken)
    assert staging.waits == 0 and [buffer[:3].tolist() for buffer in under_way] == [
        [i] * 3 for i in range(MOST_BUFFERS)
    ]
    staging.host(3)[:] = -1
    assert staging.waits == 1 and LateEvent.now == 1 and under_way[0][:3].tolist() == [-1] * 3
    LateEvent.now = LateEvent.recorded
    first = staging.host(3).__array_interface__["data"][0]
    assert staging.waits == 1 and first == under_way[1].data_ptr()


def test_a_device_that_keeps_up_needs_one_staging_buffer(monkeypatch):
    monkeypatch.setattr(LateEvent, "now", 10**9)
    staging = StagingBuffer(torch.device("cpu"), torch.int32)
    staging._new_event = LateEvent
    addresses = set()
    for _ in range(5):
        addresses.add(staging.host(4).__array_interface__["data"][0])
        staging.send()
    assert len(addresses) == 1 and staging.waits == 0


@pytest.mark.gpu
def test_a_staging_buffer_on_a_gpu_is_pinned_and_its_copies_keep_their_values():
    staging = StagingBuffer(torch.device("cuda"), torch.int32)
    sent = []
    for i in range(50):
        staging.host(1 << 20)[:] = i
        sent.append(staging.send())
    assert staging._taken.is_pinned()
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
