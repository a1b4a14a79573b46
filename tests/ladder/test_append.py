"""Every rung's append writes the same cache, by its own kernel and with its own index tensors."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.ladder.pools import Slots
from rosellm.ladder.rungs import append_from_environment
from rosellm.roseinfer.kernels.table import TORCH, Kernels
from tests.ladder.steps import CONFIG, LAYERS, make_step
from tests.roseinfer.kernels.kernel_checks import every_twin

RUNGS = ("triton_append", "full_batch", "identity_pos", "reused_index_buffers", "one_table")


def run_append(
    rung: str, positions: list[int], device: str = "cpu", kernels: Kernels = TORCH, least: int | None = 1
) -> Tensor:
    """Two appends to equal slots in all pools; both caches ``[2, L, N_BLOCKS, H, BLOCK_SIZE, D]``.

    least: rows from which on a kernel appends.
    """
    step, generator = make_step(rung, device, kernels), torch.Generator().manual_seed(1)
    step.append_from = least
    batch, heads, pools = len(positions), CONFIG.n_kv_heads, len(step.blocks.pools)
    rows = random.Random(0).sample(range(8), batch)
    for shift in (0, 8):
        fused = torch.randn(LAYERS, batch, 3 * heads, CONFIG.head_dim, generator=generator).to(device)
        keys, values = list(fused[:, :, heads : 2 * heads]), list(fused[:, :, 2 * heads :])
        step.append(keys, values, [Slots([row + shift for row in rows], positions)] * pools)
    return torch.stack((step.blocks.k_cache, step.blocks.v_cache))


@every_twin
@pytest.mark.parametrize("positions", [[2, 2, 2], [0, 3, 1], [1]], ids=str)
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_writes_what_index_put_writes(rung, positions, kernels, device):
    expected = run_append("dense", positions, device)
    assert torch.equal(run_append(rung, positions, device, kernels), expected)
    assert torch.equal(run_append(rung, positions, device, kernels, least=None), expected)


def counting_kernels(calls: Counter) -> Kernels:
    def count(name):
        def kernel(**arguments):
            calls[name, type(arguments["pos"]).__name__] += 1
            getattr(TORCH, name)(**arguments)

        return kernel

    names = ("kv_append", "kv_append_full_batch", "kv_append_identity_pos")
    return replace(TORCH, **{name: count(name) for name in names})


@pytest.mark.parametrize(
    ("rung", "positions", "lists", "kernel"),
    [
        ("cuda_graph", [1, 1], 3, None),
        ("triton_append", [1, 1], 3, ("kv_append", "Tensor")),
        ("full_batch", [1, 1], 1, ("kv_append_full_batch", "int")),
        ("full_batch", [1, 2], 3, ("kv_append", "Tensor")),
        ("identity_pos", [1, 1], 1, ("kv_append_full_batch", "int")),
        ("identity_pos", [1, 2], 2, ("kv_append_identity_pos", "Tensor")),
        ("one_table", [1, 2], 2, ("kv_append_identity_pos", "Tensor")),
    ],
)
def test_each_rung_sends_its_lists_once_a_pool_and_launches_its_kernel_once_a_layer(
    rung, positions, lists, kernel, monkeypatch
):
    calls, sent, kind = Counter(), [], type(make_step(rung))
    index_tensors = kind.index_tensors
    monkeypatch.setattr(
        kind, "index_tensors", lambda *a: (made := index_tensors(*a), sent.append(len(made)))[0]
    )
    run_append(rung, positions, kernels=counting_kernels(calls))
    assert calls == ({kernel: 2 * LAYERS} if kernel else {})
    assert sent == [lists * (1 if rung == "one_table" else LAYERS)] * 2


@pytest.mark.parametrize(("least", "is_used"), [(0, True), (3, True), (4, False), (None, False)])
def test_kernels_append_from_a_number_of_rows_on(least, is_used):
    calls = Counter()
    run_append("identity_pos", [0, 1, 2], kernels=counting_kernels(calls), least=least)
    assert bool(calls) == is_used


SWITCH, LEAST = "ROSELLM_TRITON_KV_APPEND", "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"


SET = [({}, 128), ({SWITCH: "1"}, 128), ({SWITCH: "0", LEAST: "7"}, None), ({LEAST: "7"}, 7)]
REFUSED = [(SWITCH, "yes"), (SWITCH, ""), (LEAST, "-1"), (LEAST, "many"), (LEAST, "²")]


@pytest.fixture
def environment(monkeypatch):
    for name in (SWITCH, LEAST):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(*one) for one in values.items()]


@pytest.mark.parametrize(("values", "append_from"), SET)
def test_the_environment_sets_that_number_when_a_step_is_built(environment, values, append_from):
    environment(values)
    assert append_from_environment() == make_step("one_table").append_from == append_from


@pytest.mark.parametrize(("name", "bad"), REFUSED)
def test_a_bad_variable_is_refused_by_name(environment, name, bad):
    environment({name: bad})
    with pytest.raises(RecipeError, match=name):
        append_from_environment()
