"""Configs that are wrong, or ask for what is not there: refused in one line that names the value."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rosellm.errors import CheckpointError
from rosellm.models.checkpoint import load_config
from rosellm.models.families.table import FAMILIES, read_arch
from rosellm.models.weights import dummy_model
from tests.helpers import CPU
from tests.models.family_checks import refused, sizes

HUGE = 10**30
NAN = float("nan")
ORIGINAL = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 32}
FULL, SLIDING = "full_attention", "sliding_attention"


def scaled(rope: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0} | rope | fields}


ROPES = [
    (scaled({"rope_type": "dynamic"}), "rope_type 'dynamic' is not supported; default, linear, llama3, yarn"),
    *(
        (scaled(LINEAR, factor=bad), f"factor is {bad!r}; a number above 1e-06")
        for bad in (0, "4", NAN, HUGE)
    ),
    (scaled(LINEAR, rope_theta=1), "rope_theta is 1; a number above 1"),
    (scaled(LLAMA3, low_freq_factor=4.0), "low_freq_factor is 4.0; a number below high_freq_factor 4.0"),
    (scaled(LLAMA3, **{ORIGINAL: 0.5}), f"{ORIGINAL} is 0.5; a whole number"),
    (scaled(YARN, mscale="x", mscale_all_dim=1.0), "mscale is 'x'"),
    (scaled(YARN, factor=1e11), "n_positions is 3200000000000; a whole number from 1 to 2147483647"),
    (scaled({}, partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported; only 1.0 is"),
    ({"rope_parameters": {FULL: YARN, SLIDING: LLAMA3}}, "differ between kinds of layers"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; an object is needed"),
]
SHAPES = [
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "n_heads 6 is not a multiple of n_kv_heads 4"),
    ({"num_key_value_heads": 2.0}, "n_kv_heads is 2.0; a whole number"),
    ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even one"),
    ({"head_dim": None, "num_attention_heads": 5}, "d_model 48 is not a multiple of n_heads 5"),
    ({"num_hidden_layers": 10**9}, "n_layers is 1000000000; a whole number from 1 to 4096"),
    ({"max_position_embeddings": 0}, "n_positions is 0"),
    *(({"rms_norm_eps": bad}, f"norm_eps is {bad!r}") for bad in (0, NAN, "1e-6", None)),
    ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported; only 'silu'"),
    *(({"eos_token_id": bad}, "eos_token_id is", "token id") for bad in ("</s>", [1, 2.0], -1)),
    ({"dtype": ["float16"]}, "dtype ['float16'] is not supported; float32"),
    ({"quantization_config": {}}, "quantization_config of None is not supported; compressed-tensors with"),
    ({"quantization_config": "awq"}, "quantization_config of 'awq' is not supported"),
    ({"hidden_size": None}, "config.json lacks hidden_size"),
    ({"head_dim": 10**4000}, "an integer of 13288 bits"),
]
BOTH = {"sliding_window": 7, "use_sliding_window": True}
LAYERS = [
    ({"layer_types": [FULL, SLIDING]}, f"layers of {FULL} and of {SLIDING} in one model"),
    ({"layer_types": [SLIDING]}, f"layer_types is ['{SLIDING}']; a list of 2 kinds"),
    ({"layer_types": [SLIDING] * 2, "sliding_window": None}, "but there is no sliding_window"),
]
MORE_LAYERS = [
    ({"max_window_layers": 1}, f"layers of {FULL} and of {SLIDING} in one model"),
    ({"use_sliding_window": None}, "use_sliding_window is None; true or false"),
]
OF_ALL = [("llama" if i % 2 else "qwen3", *case) for i, case in enumerate(ROPES + SHAPES)]
OF_ALL += [(family, BOTH | change, words) for family in ("mistral", "qwen2") for change, words in LAYERS]
OF_ALL += [("qwen3", BOTH | change, words) for change, words in MORE_LAYERS]
OWN = [
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "(longrope) are not supported"),
    ("qwen3", {"attention_bias": True}, "attention_bias True is not supported"),
    ("llama", {"attention_bias": "no"}, "attention_bias is 'no'; true or false is needed"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
    ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights 1 is not supported; only True is"),
    ("gpt2", {"n_layer": None}, "config.json lacks n_layer"),
    *(("llama", {"model_type": bad}, f"model_type {bad!r}", *FAMILIES) for bad in ("mamba", [], "a\nb")),
]


@pytest.mark.parametrize("case", OF_ALL + OWN, ids=lambda case: f"{case[0]}-{case[2]}"[:70])
def test_a_bad_field_is_refused_with_its_value(case):
    family, change, *words = case
    refused(CheckpointError, words, read_arch, sizes(family) | {"model_type": family} | change)


def test_a_table_of_angles_that_no_memory_holds_is_refused_before_it_is_made(tmp_path):
    huge = {"max_position_embeddings": 2**31 - 1, "head_dim": 2048, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes("llama") | {"model_type": "llama"} | huge))
    with pytest.raises(CheckpointError, match="take .* GB with 2,147,483,647 positions; device 'cpu' has"):
        dummy_model(str(tmp_path), CPU, torch.float32)


@pytest.mark.parametrize("text", ['{"eos_token_id": ["a"]}', '{"eos_token_id": -1}', "[]", "{"])
def test_a_bad_generation_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps(sizes("llama") | {"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="generation_config.json|eos_token_id"):
        load_config(tmp_path)
