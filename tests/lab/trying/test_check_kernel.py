"""A reader's kernel against its specification: right ones pass; the cases, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, strategies as st

from rosellm.lab.trying import makers
from rosellm.lab.trying.case import GPT2, GROUPED, ODD, cases
from rosellm.lab.trying.check_kernel import NAMES, check_kernel, faults_of, launches
from rosellm.lab.trying.guarded_memory import Draw
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from tests.helpers import CPU, INTERPRETED, ON_GPU

GUARD = 64 * 7  # elements around rows of seven
SHORT = [
    one for one in cases(None, (torch.float32,), 0, 2) if one.width < 2048 and one.rows + one.cached < 100
]
# Attention and noise take the interpreter seconds at the largest sizes: they are tried at one other.
SLOW = {"paged_attention_decode", "prefill_attention", "append_and_attend", "gumbel_noise", "position_heads"}


def nothing(**operands):
    TORCH.silu_mul(**operands)


@pytest.mark.parametrize("name", NAMES)
def test_every_specification_passes_its_own_check(name):
    verdict = check_kernel(name, getattr(TORCH, name), device="cpu")
    assert verdict.passed and "PASSED 21 cases" in str(verdict), str(verdict)
    assert not verdict.interpreted


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("device", [INTERPRETED, ON_GPU])
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_of_the_package_passes(name, device):
    """Interpreted, a few small cases: long ones take the interpreter minutes."""
    if device == "cpu":
        some = [replace(GROUPED, option=2)] if name in SLOW else SHORT[:5]
        with launches() as launched:
            for i, case in enumerate(some):
                assert not faults_of(name, getattr(TRITON, name), case, i, CPU), case
        assert launched
        return
    verdict = check_kernel(name, getattr(TRITON, name), device=device, n_random=2)
    assert verdict.passed, str(verdict)
    assert not verdict.interpreted and verdict.launched


def test_one_wrong_element_of_a_result_is_told_with_its_place():
    def wrong(*, x):
        result = TORCH.silu_mul(x=x)
        result[-1, -1] += 1
        return result

    told = faults_of("silu_mul", wrong, ODD, 0, CPU)
    assert len(told) == 1 and told[0].startswith("the result[4, 36]: ") and "1 of 185 elements" in told[0]


def test_inputs_are_new_each_time_and_the_same_for_the_same_seed():
    assert len({check_kernel("silu_mul", nothing, device="cpu").seed for _ in range(3)}) == 3
    first, again = (check_kernel("silu_mul", nothing, device="cpu", seed=9) for _ in range(2))
    assert first == again


def test_heads_are_slices_of_a_fused_projection_and_columns_those_of_a_state():
    given = makers.append_and_attend(GPT2, Draw(0, CPU))
    assert given["q"].stride(0) == given["k_new"].stride(0) == 36 * 64
    assert given["positions"].stride(0) == given["block_table"].stride(0) > 10
    assert (given["positions"] < 0).any() and given["k_cache_layer"].isnan().any()


@given(place=st.integers(0, 2 * GUARD + 5 * 7 - 1), value=st.sampled_from([0.0, -1.0, math.inf]))
def test_any_element_that_is_touched_is_told_and_placed(place, value):
    """A window of three of five rows, every second element of them."""
    one, other = Draw(1, CPU), Draw(1, CPU)
    for draw in (one, other):
        window = draw.name("x", draw.lay(draw.normal(5, 7), torch.float32)[:3, ::2])
    (buffer,), (right,) = one.buffers, other.buffers
    assert buffer.memory.numel() == 2 * GUARD + 35
    buffer.memory[place] = value
    (told,) = buffer.faults(right.memory.clone(), right, exact=False)
    inside = {GUARD + 7 * i + j for i in range(3) for j in range(0, 7, 2)}
    assert window.shape == (3, 4)
    assert told.startswith("x[" if place in inside else "memory ")
    assert ("before the beginning" in told) == (place < GUARD)
    assert ("past the end" in told) == (place > max(inside))


@triton.jit
def touch(pointer):
    tl.store(pointer + tl.program_id(0), 1.0)


@pytest.mark.parametrize("grid", [(3, 2), lambda arguments: (3, 2)])
def test_launches_are_noted_by_name(grid):
    target = torch.zeros(3, device="cuda" if torch.cuda.is_available() else "cpu")

    def launching(*, x):
        touch[grid](target)
        return TORCH.silu_mul(x=x)

    verdict = check_kernel("silu_mul", launching, n_random=0)
    assert verdict.launched == {"touch"} and target.sum() == 3
    assert verdict.interpreted == (not torch.cuda.is_available())
