"""Shapes: their sizes, and GPT-2's to and from Hugging Face's config.json."""

from __future__ import annotations

import pytest

from rosellm.errors import CheckpointError
from rosellm.models.arch import Norm
from rosellm.models.families.table import KNOWN_SHAPES, read_arch, write_arch
from tests.helpers import small_config

HF = {"model_type": "gpt2", "vocab_size": 101, "n_positions": 64, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.mark.parametrize(
    "config",
    [
        small_config(),
        small_config(d_ff=48, tie_embeddings=False, eos_token_ids=(7,), norm=Norm(eps=1e-6)),
        *KNOWN_SHAPES.values(),
    ],
    ids=lambda c: str(c.n_parameters),
)
def test_a_config_survives_the_round_trip(config):
    assert read_arch(write_arch(config)) == config


def test_a_sparse_config_takes_gpt2s_defaults():
    assert read_arch(HF | {"n_inner": None}) == small_config(d_ff=128, n_kv_heads=2, norm=Norm(eps=1e-5))


def test_what_we_write_is_what_transformers_writes():
    from transformers import GPT2Config

    ours = write_arch(small_config(d_ff=48, eos_token_ids=(7,), tie_embeddings=False))
    theirs = GPT2Config(**{k: v for k, v in ours.items() if k != "model_type"}).to_dict()
    assert {name: theirs[name] for name in ours if name in theirs} == {
        k: v for k, v in ours.items() if k in theirs
    }
    assert read_arch(theirs) == read_arch(ours)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},
        {"model_type": None},
        {"activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"scale_attn_weights": False},
        {"n_layer": 0},
        {"n_head": "2"},
        {"n_embd": 33},
        {"vocab_size": -1},
        {"n_positions": 1.5},
        {"n_layer": True},
        {"n_inner": -4},
        {"n_inner": 0},
    ],
    ids=str,
)
def test_what_the_model_does_not_do_is_refused_with_the_value(change):
    ((_, value),) = change.items()
    with pytest.raises(CheckpointError) as caught:
        read_arch(HF | change)
    assert str(value).lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    "change",
    [
        {"layer_norm_epsilon": "small"},
        {"layer_norm_epsilon": 0},
        {"tie_word_embeddings": "no"},
        {"eos_token_id": [1, "2"]},
        {"eos_token_id": [1, True]},
        {"eos_token_id": [[1]]},
        {"eos_token_id": "</s>"},
        {"eos_token_id": -1},
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_refused(change):
    with pytest.raises(CheckpointError):
        read_arch(HF | change)


@pytest.mark.parametrize("name", ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd"])
def test_a_missing_field_is_named(name):
    with pytest.raises(CheckpointError, match=name):
        read_arch({k: v for k, v in HF.items() if k != name})
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        read_arch(HF | {name: None})


@pytest.mark.parametrize(
    ("given", "ids"),
    [({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 0]}, (7, 0))],
    ids=str,
)
def test_a_config_names_no_end_of_text_one_or_several(given, ids):
    assert read_arch(HF | given).eos_token_ids == ids


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_config_names_its_checkpoints_dtype(name):
    assert read_arch(HF | {name: "bfloat16"}).dtype == "bfloat16"
    assert read_arch(HF | {name: None}).dtype is None
    with pytest.raises(CheckpointError, match="dtype 'int4' is not supported; float32, float16, bfloat16"):
        read_arch(HF | {name: "int4"})


def test_no_key_value_heads_are_refused():
    with pytest.raises(CheckpointError, match="n_kv_heads is 0"):
        small_config(n_kv_heads=0)


def test_head_counts_must_divide():
    with pytest.raises(CheckpointError, match="n_kv_heads 3"):
        small_config(n_heads=4, n_kv_heads=3)


def test_derived_sizes():
    config = small_config(n_heads=4, n_kv_heads=2)
    assert (config.head_dim, config.qkv_width, config.d_ff) == (8, 64, 128)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2
    assert KNOWN_SHAPES["gpt2"].kv_bytes_per_token(2) == 36_864
