"""Block tables and index tensors: the same by every rung, in the fewest copies."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rosellm.ladder.dense import BUILD_RANGE, H2D_RANGE
from rosellm.roseinfer.cache.staging import StagingBuffer
from tests.ladder.steps import LAYERS, N_BLOCKS, WIDTH, make_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RUNGS = ("dense", "pinned_h2d", "resident_tables")


def random_tables(lengths: list[int], seed: int = 0) -> list[list[list[int]]]:
    """Blocks ``[pool][row]``."""
    rng = random.Random(seed)
    return [[[rng.randrange(N_BLOCKS) for _ in range(n)] for n in lengths] for _ in range(LAYERS)]


def device_work(run) -> list[str]:
    """Names of the kernels and copies of a run on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if event.name not in (BUILD_RANGE, H2D_RANGE)]


def n_copies(work: list[str]) -> int:
    return sum("Memcpy HtoD" in name for name in work)


@pytest.mark.gpu
def test_host_to_device_copies_are_one_a_layer_or_one_in_all_or_none_for_what_has_not_changed():
    for rung, expected in (("dense", LAYERS), ("pinned_h2d", 1)):
        step = make_step(rung, "cuda")
        step.stage_tables(random_tables([2, 3]))
        assert n_copies(device_work(lambda step=step: step.stage_tables(random_tables([2, 3])))) == expected
    step, tables = make_step("resident_tables", "cuda"), random_tables([2, 3, 1])
    step.stage_tables(tables)
    grow(tables, 1)
    work = device_work(lambda: step.stage_tables(tables))
    assert len(work) == 2 and n_copies(work) == 1
    assert device_work(lambda: step.stage_tables(tables)) == []
    step = make_step("reused_index_buffers", "cuda")
    step.index_tensors([[1, 2]] * 6, torch.int32)
    assert n_copies(device_work(lambda: step.index_tensors([[3, 4]] * 6, torch.int32))) == 1


def grow(tables, row: int) -> None:
    """One more block for a row, in every pool."""
    for rows in tables:
        rows[row].append(7)


@pytest.fixture
def sends(monkeypatch) -> list[int]:
    """Elements of each copy of a staging buffer."""
    sizes: list[int] = []
    send = StagingBuffer.send

    def counted(staging: StagingBuffer, *out) -> torch.Tensor:
        sent = send(staging, *out)
        sizes.append(sent.numel())
        return sent

    monkeypatch.setattr(StagingBuffer, "send", counted)
    return sizes


def changed(sequences: list[list[list[int]]], rng: random.Random) -> None:
    """One change of the blocks ``[sequence][pool]``."""
    kind = rng.choice(["start", "start", "end", "grow", "grow", "clone", "shuffle", "refill"])
    if kind == "start" or not sequences:
        n = rng.randrange(3)
        sequences.append([[rng.randrange(N_BLOCKS) for _ in range(n)] for _ in range(LAYERS)])
    one = rng.choice(sequences)
    for ids in one:
        if kind == "grow" and len(ids) < WIDTH:
            ids.append(rng.randrange(N_BLOCKS))
        if kind == "clone" and ids:
            ids[-1] = rng.randrange(N_BLOCKS)
        if kind == "refill":
            ids[:] = [rng.randrange(N_BLOCKS) for _ in ids]
    if kind == "end" and len(sequences) > 1:
        sequences.remove(one)
    if kind == "shuffle":
        rng.shuffle(sequences)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rung", [*RUNGS, "one_table"])
def test_tables_hold_each_rows_blocks_and_resident_ones_are_sent_changed_rows_alone(rung, device, sends):
    """Staging again leaves earlier tables alone, but for resident ones; the lists stay as they are."""
    rng, step, pools = random.Random(0), make_step(rung, device), 1 if rung == "one_table" else LAYERS
    sequences, sent, address = [], [], 0  # sent: what each row of the resident tables was last sent
    is_resident, earlier = rung in ("resident_tables", "one_table"), []
    for _ in range(200):
        changed(sequences, rng)
        tables = [[one[pool] for one in sequences] for pool in range(pools)]
        given = copy.deepcopy(tables)
        sends.clear()
        found = step.stage_tables(tables)
        assert tables == given and len(found) == pools
        for table, rows in zip(found, tables, strict=True):
            assert (table.shape, table.dtype, table.device.type) == ((len(rows), WIDTH), torch.int32, device)
            for row, wanted in zip(table.tolist(), rows, strict=True):
                assert row[: len(wanted)] == wanted and all(0 <= i < N_BLOCKS for i in row)
            earlier.append((table, table.clone()))
        if is_resident:
            if found.data_ptr() != address:
                sent, address = [], found.data_ptr()  # a larger buffer
            own = [one[:pools] for one in sequences]
            before = sent + [[[]] * pools] * len(own)
            n_changed = sum(row != old for row, old in zip(own, before, strict=False))
            assert sends == [n_changed * (2 + pools * WIDTH)] * bool(n_changed)
            sent[: len(own)] = copy.deepcopy(own)
    assert is_resident or all(torch.equal(*pair) for pair in earlier)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("rung", "is_reused"), [("dense", False), ("mutable_block_info", False), ("reused_index_buffers", True)]
)
def test_index_lists_become_device_tensors_in_buffers_that_are_reused_from_their_rung_on(
    rung, is_reused, dtype, device
):
    step, kept = make_step(rung, device), []
    for rows in ([[1, 2, 3], [4, 5, 6]], [[7]], [list(range(40))] * 5, [[8, 9]], [[3, 2]]):
        tensors = step.index_tensors(iter(rows), dtype)
        assert [t.tolist() for t in tensors] == rows
        assert all(t.dtype == dtype and t.device.type == device and t.is_contiguous() for t in tensors)
        kept.append(tensors[0])
    assert (kept[-1].data_ptr() == kept[-2].data_ptr()) == is_reused
