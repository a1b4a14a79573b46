"""Parts of a model: together they are the whole, and what cannot be cut is refused in a line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rosellm.errors import OptionError
from rosellm.models.arch import Arch, Norm
from rosellm.models.part import Part
from rosellm.models.rope import Rope
from rosellm.models.weights import load_model, save_model
from tests.helpers import CPU, FAMILIES, random_model, small_config

SIZES = {"n_heads": 8, "d_model": 64, "head_dim": 8, "d_ff": 64, "vocab_size": 500}
SHAPES = {
    "gpt2": small_config(**SIZES),
    **{name: small_config(**change | SIZES, family=name) for name, change in FAMILIES.items()},
}


def parts_of(whole: Arch, n: int) -> list[Part]:
    return [Part(rank, n) for rank in range(n)]


def cut(part: Part, name: str, value: torch.Tensor, whole: Arch) -> torch.Tensor:
    return part.cut(name, value, part.pieces(name, whole, len(value)))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, Arch]:
    """A number of ranks, and a model that they may be able to run."""
    size, n_kv, group, share = (draw(st.integers(1, most)) for most in (6, 4, 4, 6))
    vocab, mlp = draw(st.integers(1, 700)), draw(st.sampled_from(("gelu", "swiglu")))
    heads = vocab, 8, 1, n_kv * group, 16, n_kv, 4
    return size, Arch(*heads, share * size, Norm("rms"), Rope(), mlp)


@settings(deadline=None)
@given(shapes())
def test_what_parts_have_is_the_whole_once_and_key_value_heads_as_often_as_there_are_too_few(shape):
    size, arch = shape
    parts = parts_of(arch, size)
    try:
        parts[0].check(arch)
    except OptionError:
        return
    assert [word for part in parts for word in part.words(arch)] == list(range(arch.vocab_size))
    for name in "qkv", "up":
        whole = torch.arange(arch.shapes[name][0])
        kept = [cut(part, f"blocks.0.{name}.bias", whole, arch) for part in parts]
        assert [len(own) for own in kept] == [part.arch(arch).shapes[name][0] for part in parts]
        times = torch.bincount(torch.cat(kept))
        n_queries = arch.attention_width if name == "qkv" else len(whole)
        assert (times[:n_queries] == 1).all()
        assert (times[n_queries:] == max(1, size // arch.n_kv_heads)).all()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_a_part_is_loaded_as_it_is_cut_from_the_whole(tmp_path, name, size):
    whole = random_model(0, SHAPES[name])
    save_model(whole, tmp_path, torch.float32)
    head = load_model(str(tmp_path), CPU, torch.float32, quantization="int8").lm_head.weight
    for part in parts_of(whole.config, size):
        loaded = load_model(str(tmp_path), CPU, torch.float32, part)
        for parameter, value in whole.own_parameters.items():
            assert torch.equal(loaded.own_parameters[parameter], cut(part, parameter, value, whole.config))
        words = list(loaded.words)
        assert torch.equal(loaded.lm_head.weight, whole.lm_head.weight[words])
        own = load_model(str(tmp_path), CPU, torch.float32, part, "int8").lm_head.weight
        assert torch.equal(own.dequantized(), head[words].dequantized())


@pytest.mark.parametrize(
    "size, change, said",
    [
        (3, {}, "3 does not divide the model's 8 attention heads"),
        (4, {"d_ff": 66}, "4 does not divide the model's 66 intermediate size"),
        (6, {"n_heads": 12, "n_kv_heads": 4, "d_ff": 66}, "6 neither divides the model's 4 key/value heads"),
        (8, {"vocab_size": 448}, "8 is too large: the vocabulary of 448"),
        (2, {"vocab_size": 64}, "2 is too large: the vocabulary of 64"),
    ],
)
def test_what_cannot_be_cut_is_told_in_a_line(size, change, said):
    arch = small_config(**FAMILIES["llama"] | SIZES | change)
    with pytest.raises(OptionError, match=said) as raised:
        Part(0, size).check(arch)
    assert "\n" not in str(raised.value)
