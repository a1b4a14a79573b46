"""A reader's kernel against its specification: every planted fault is found and told, right ones pass."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, strategies as st

from rosellm.lab.trying.case import GPT2, GROUPED, ODD, cases
from rosellm.lab.trying.check_kernel import MAKERS, NAMES, KernelError, check_kernel, faults_of, launches
from rosellm.lab.trying.guarded_memory import Draw
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from tests.helpers import CPU, INTERPRETED, ON_GPU

append = TORCH.kv_append_identity_pos
add_norm = TORCH.add_norm
GUARD = 64 * 7  # elements around rows of seven
SHORT = [
    one for one in cases(None, (torch.float32,), 0, 2) if one.width < 2048 and one.rows + one.cached < 100
]
# Attention and noise take the interpreter seconds at the largest sizes: they are tried at two others.
SLOW = {"paged_attention_decode", "prefill_attention", "append_and_attend", "gumbel_noise", "position_heads"}


def copies_64_elements(*, k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos):
    """Of a row's heads laid end to end."""
    n = max(1, 64 // key_new.shape[2])
    caches = {"k_cache_layer": k_cache_layer[:, :n], "v_cache_layer": v_cache_layer[:, :n]}
    append(**caches, key_new=key_new[:, :n], value_new=value_new[:, :n], block_idx=block_idx, pos=pos)


def copies_64_elements_of_each_head(*, k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos):
    """Right for GPT-2's heads, not for the wider ones of Qwen3 and Llama 3."""
    caches = {"k_cache_layer": k_cache_layer[..., :64], "v_cache_layer": v_cache_layer[..., :64]}
    append(**caches, key_new=key_new[..., :64], value_new=value_new[..., :64], block_idx=block_idx, pos=pos)


def writes_nine_rows(*, key_new, value_new, block_idx, pos, **caches):
    rows = {"key_new": key_new, "value_new": value_new, "block_idx": block_idx, "pos": pos}
    append(**caches, **{name: one[:9] for name, one in rows.items()})


def no_value(*, v_cache_layer, **operands):
    append(v_cache_layer=torch.empty_like(v_cache_layer), **operands)


def keys_as_values(*, value_new, key_new, **operands):
    append(key_new=key_new, value_new=key_new, **operands)


def takes_rows_for_contiguous(*, key_new, value_new, **operands):
    key_new = key_new.as_strided(key_new.shape, (key_new[0].numel(), *key_new.stride()[1:]))
    append(key_new=key_new, value_new=value_new, **operands)


def a_row_too_many(*, key_new, value_new, block_idx, pos, **caches):
    more = {"key_new": key_new, "value_new": value_new, "block_idx": block_idx, "pos": pos}
    longer = {
        name: one.as_strided((len(one) + 1, *one.shape[1:]), one.stride(), one.storage_offset())
        for name, one in more.items()
    }
    append(**caches, **longer)


def writes_inert_rows(**operands):
    operands["k_cache_layer"][operands["block_idx"], :, operands["pos"]] = operands["key_new"]
    append(**operands)


def spoils_its_input(*, pos, **operands):
    append(pos=pos, **operands)
    pos.zero_()


def before_the_cache(*, k_cache_layer, **operands):
    append(k_cache_layer=k_cache_layer, **operands)
    k_cache_layer.as_strided((1,), (1,), k_cache_layer.storage_offset() - 3).zero_()


def raises(**operands):
    raise RuntimeError("no such kernel\nand more")


def remembers_its_first_call():
    """By shape: new inputs of a shape that it has seen get the old answer."""
    known = {}

    def norm(*, x, **operands):
        return known.setdefault(tuple(x.shape), add_norm(x=x, **operands))

    return norm


def leaves_x(*, x, **operands):
    return add_norm(x=x.clone(), **operands)


def without_eps(*, eps, **operands):
    return add_norm(eps=0.0, **operands)


def writes_past_its_result(**operands):
    right = add_norm(**operands)
    out = torch.empty_like(right)
    out.as_strided((out.numel() + 2,), (1,), out.storage_offset()).fill_(1.0)
    return out.copy_(right)


def leaves_its_last_column(**operands):
    right = add_norm(**operands)
    out = right.new_empty(right.shape)
    out[:, :-1] = right[:, :-1]
    return out


def writes_between_rows(*, key_new, **operands):
    append(key_new=key_new, **operands)
    if len(key_new) > 1:  # the next row's query
        key_new.as_strided((1,), (1,), key_new.storage_offset() + key_new.stride(0) - 1).zero_()


def spoils_values(*, q, k, **operands):
    TORCH.position_heads(q=q, k=k, **operands)
    q.as_strided((1,), (1,), q.storage_offset() + q[0].numel() + k[0].numel() + 1).zero_()  # a value


def reads_past_the_context(*, context_lens, **operands):
    return TORCH.paged_attention_decode(context_lens=(context_lens + 1).clamp_max(5), **operands)


def gathers_the_whole_table(*, block_table, k_cache_layer, **operands):
    k_cache_layer[block_table.long()]  # entries past a context may be anything
    return TORCH.paged_attention_decode(block_table=block_table, k_cache_layer=k_cache_layer, **operands)


def by_the_wrong_group(*, k_new, v_new, q, **operands):
    h, kv = q.shape[1], k_new.shape[1]
    order = torch.arange(h).view(kv, h // kv).T.flatten()  # right where every head has its own keys
    out = TORCH.paged_attention_decode(q=q[:, order.argsort()], k_new=k_new, v_new=v_new, **operands)
    return out[:, order]


def of_the_wrong_type(**operands):
    return TORCH.silu_mul(**operands).double()


def nothing(**operands):
    TORCH.silu_mul(**operands)


def of_whole_chunks(*, x, weight, **operands):
    """K in chunks of 16, without the last one that is not whole."""
    k = max(1, x.shape[1] // 16 * 16)
    return TORCH.some_rows_linear(x=x[:, :k], weight=weight[:, :k], **operands)


def the_second_best(*, hidden, **operands):
    return TORCH.best_tokens(hidden=-hidden, **operands)


def never_stops(*, state, **operands):
    stops = state.stops.clone()
    state.stops.fill_(-1)
    TORCH.advance(state=state, **operands)
    state.stops.copy_(stops)


# Kernel, what is planted, and what the message says of it.
PLANTED = [
    ("kv_append_identity_pos", copies_64_elements, r"cache_layer\[\d+, .*found poison.*never written"),
    (
        "kv_append_identity_pos",
        copies_64_elements_of_each_head,
        r"cache_layer\[\d+, \d+, \d+, 64\]: found poison.*never written",
    ),
    ("kv_append_identity_pos", writes_nine_rows, r"cache_layer\[\d+, .*found poison.*never written"),
    ("kv_append_identity_pos", no_value, r"v_cache_layer\[.*never written, 4 of"),
    ("kv_append_identity_pos", keys_as_values, r"v_cache_layer\[.*a wrong value"),
    ("kv_append_identity_pos", takes_rows_for_contiguous, r"k_cache_layer\[.*a wrong value"),
    ("kv_append_identity_pos", a_row_too_many, r"k_cache_layer\[.*expected poison \(written by mistake"),
    ("kv_append_identity_pos", writes_inert_rows, r"k_cache_layer\[.*written by mistake"),
    ("kv_append_identity_pos", spoils_its_input, r"pos\[\d+\]: found 0, expected [1-9].*written by mistake"),
    ("kv_append_identity_pos", before_the_cache, r"memory 3 before the beginning of k_cache_layer: found 0"),
    ("kv_append_identity_pos", raises, r"raised RuntimeError: no such kernel$"),
    ("add_norm", remembers_its_first_call(), r"the result\[0, 0\]: found .* \(a wrong value"),
    ("add_norm", leaves_x, r"x\[0, 0\]: found .*never written"),
    ("add_norm", without_eps, r"the result\[0, \d+\]"),
    ("add_norm", writes_past_its_result, r"memory 1 past the end of a tensor that it made: found 1 "),
    ("add_norm", leaves_its_last_column, r"the result\[0, 0\]: found poison, expected"),
    (
        "kv_append_identity_pos",
        writes_between_rows,
        r"memory between the rows of key_new: found 0, .*outside, 1 e",
    ),
    (
        "position_heads",
        spoils_values,
        r"v\[0, 0, 1\]: found 0, expected .* \(written by mistake, 1 of 4 elements",
    ),
    ("paged_attention_decode", reads_past_the_context, r"the result\[0, 0, 0\]|raised "),
    ("paged_attention_decode", gathers_the_whole_table, r"raised IndexError: index \d+ is out of bounds"),
    ("paged_attention_decode", by_the_wrong_group, r"the result\[0, 1, 0\].*a wrong value"),
    ("silu_mul", of_the_wrong_type, r"the result is \[1, 1\] float64 on cpu, expected \[1, 1\] float32"),
    ("silu_mul", nothing, r"returned nothing, expected \[1, 1\] float32 on cpu"),
    ("some_rows_linear", of_whole_chunks, r"the result\[0, 0\]: found .* \(a wrong value"),
    ("best_tokens", the_second_best, r"result 1\[0, 0\]: found \d+, expected \d+ "),
    ("advance", never_stops, r"state.rows\[\d+, 1\]: found \d+, expected -1 "),
]


@pytest.mark.parametrize(
    ("name", "kernel", "message"), PLANTED, ids=lambda one: getattr(one, "__name__", None)
)
def test_a_planted_fault_is_found_and_told(name, kernel, message):
    verdict = check_kernel(name, kernel, device="cpu", seed=5)
    assert not verdict.passed
    assert re.search(message, str(verdict), re.MULTILINE), str(verdict)
    assert str(verdict).startswith(f"{name} FAILED in case {verdict.n_cases} (seed 5):\n  ")


def test_the_grouped_kernel_is_right_wherever_every_head_has_its_own_keys():
    assert not faults_of("paged_attention_decode", by_the_wrong_group, ODD, 0, CPU)


def test_the_case_that_failed_is_told_with_shapes_types_and_strides():
    told = check_kernel("kv_append_identity_pos", takes_rows_for_contiguous, device="cpu", seed=1).case
    assert "k_cache_layer [71, 3, 4, 6] float32" in told
    assert "key_new [5, 3, 6] float32, rows 54 apart" in told


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
        some = (ODD, replace(ODD, option=1), replace(GROUPED, option=2)) if name in SLOW else SHORT
        with launches() as launched:
            for i, case in enumerate(some):
                assert not faults_of(name, getattr(TRITON, name), case, i, CPU), case
        assert launched
        return
    verdict = check_kernel(name, getattr(TRITON, name), device=device, n_random=2)
    assert verdict.passed, str(verdict)
    assert not verdict.interpreted and verdict.launched


def test_inputs_are_new_each_time_and_the_same_for_the_same_seed():
    seeds = {check_kernel("silu_mul", nothing, device="cpu").seed for _ in range(3)}
    assert len(seeds) == 3
    first, again = (check_kernel("add_norm", without_eps, device="cpu", seed=9) for _ in range(2))
    assert first == again


def test_cases_reach_from_one_row_to_gpt_2_s_sizes_and_further():
    sizes = list(cases(None, (torch.float32,), 0, 3))
    assert min(one.rows for one in sizes) == 1 and max(one.rows for one in sizes) > 128
    assert any((one.heads, one.head_dim, one.block_size, one.rows) == (12, 64, 64, 33) for one in sizes)
    assert max(one.head_dim for one in sizes) == 128 and max(one.width for one in sizes) == 8448
    assert max(one.outputs for one in sizes) == 5000 and max(one.cached for one in sizes) == 1025
    assert any(one.width % 2 for one in sizes) and any(one.heads > one.kv_heads for one in sizes)


def test_heads_are_slices_of_a_fused_projection_and_columns_those_of_a_state():
    given = MAKERS["append_and_attend"](GPT2, Draw(0, CPU))
    assert given["q"].stride(0) == given["k_new"].stride(0) == 36 * 64
    assert given["positions"].stride(0) == given["block_table"].stride(0) > 10
    assert (given["positions"] < 0).any() and given["k_cache_layer"].isnan().any()


def test_unknown_kernels_and_what_cannot_be_called_are_refused():
    with pytest.raises(
        KernelError, match="no kernel 'norm' to replace: there are paged_attention_decode, .*advance"
    ):
        check_kernel("norm", add_norm)
    with pytest.raises(KernelError, match="choose_filtered serves requests with filters .* does not run"):
        check_kernel("choose_filtered", nothing, device="cpu")
    with pytest.raises(KernelError, match="add_norm=3 cannot be called"):
        check_kernel("add_norm", 3)


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
def test_launches_are_noted_with_their_names_and_programs(grid):
    target = torch.zeros(3, device="cuda" if torch.cuda.is_available() else "cpu")
    with launches() as seen:
        touch[grid](target)
        touch[(1,)](target)
    assert [(one.name, one.programs) for one in seen] == [("touch", 6), ("touch", 1)]
    assert target.sum() == 3
