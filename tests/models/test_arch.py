"""Shapes: their sizes, and GPT-2's to and from Hugging Face's config.json."""

from __future__ import annotations

import pytest

from rosellm.models.arch import Norm
from rosellm.models.families.table import KNOWN_SHAPES, read_arch, write_arch
from tests.helpers import small_config

HF = {"model_type": "gpt2", "vocab_size": 101, "n_positions": 64, "n_layer": 2, "n_head": 2, "n_embd": 32}


def test_a_sparse_config_takes_gpt2s_defaults():
    assert read_arch(HF | {"n_inner": None}) == small_config(d_ff=128, n_kv_heads=2, norm=Norm(eps=1e-5))


def test_what_we_write_is_what_transformers_writes():
    from transformers import GPT2Config

    arch = small_config(d_ff=48, eos_token_ids=(7,), tie_embeddings=False, norm=Norm(eps=1e-6))
    ours = write_arch(arch)
    theirs = GPT2Config(**{name: value for name, value in ours.items() if name != "model_type"}).to_dict()
    assert {name: theirs[name] for name in ours} == ours
    assert read_arch(theirs) == read_arch(ours) == arch


@pytest.mark.parametrize(
    ("given", "ids"),
    [({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 0]}, (7, 0))],
    ids=str,
)
def test_a_config_names_no_end_of_text_one_or_several(given, ids):
    assert read_arch(HF | given).eos_token_ids == ids


def test_a_config_names_its_checkpoints_dtype_in_either_field():
    for name in ("dtype", "torch_dtype"):
        assert read_arch(HF | {name: "bfloat16"}).dtype == "bfloat16"
        assert read_arch(HF | {name: None}).dtype is None


def test_derived_sizes():
    config = small_config(n_heads=4, n_kv_heads=2)
    assert (config.head_dim, config.qkv_width, config.d_ff) == (8, 64, 128)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2
    assert KNOWN_SHAPES["gpt2"].kv_bytes_per_token(2) == 36_864
