"""Configs of rotary families that are wrong, or ask for what is not there: refused in one line."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rosellm.errors import CheckpointError
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import load_config
from rosellm.models.families.table import FAMILIES, read_arch, write_arch
from rosellm.models.weights import dummy_model, load_model
from tests.models.family_checks import CPU, sizes, their_model

ROTARY = [family for family in FAMILIES if family != "gpt2"]
HUGE = 10**30
NAN, INFINITE = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_arch(config)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def scaled(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0} | fields}


ANGLES = [
    (scaled(rope_type="dynamic", factor=2.0), "'dynamic' is not supported; default, linear, llama3, yarn"),
    (scaled(rope_type="longrope", long_factor=[1.0]), "rope_type 'longrope' is not supported"),
    (scaled(rope_type=None), "rope_type None is not supported"),
    (scaled(rope_type=["yarn"]), "rope_type ['yarn'] is not supported"),
    ({"rope_scaling": {"type": "su"}}, "rope_type 'su' is not supported"),
    (scaled(rope_type="linear"), "factor is None in the rope parameters; a number above"),
    (scaled(rope_type="linear", factor=0), "factor is 0 in the rope parameters"),
    (scaled(rope_type="linear", factor=-2.0), "factor is -2.0"),
    (scaled(rope_type="linear", factor="4"), "factor is '4'"),
    (scaled(rope_type="linear", factor=True), "factor is True"),
    (scaled(rope_type="linear", factor=NAN), "factor is nan"),
    (scaled(rope_type="linear", factor=INFINITE), "factor is inf"),
    (scaled(rope_type="linear", factor=HUGE), f"factor is {HUGE} in the rope parameters; a number above"),
    (scaled(rope_type="linear", factor=1e-300), "factor is 1e-300"),
    (scaled(rope_type="linear", factor=[2.0]), "factor is [2.0]"),
    (scaled(rope_theta="10000"), "rope_theta is '10000'"),
    (scaled(rope_theta=NAN), "rope_theta is nan"),
    (scaled(rope_theta=1), "rope_theta is 1 in the rope parameters; a number above 1 and"),
    (scaled(rope_theta=-5.0), "rope_theta is -5.0"),
    ({"rope_theta": 10**400}, "rope_theta is an integer of 1329 bits in"),
    (scaled(**LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor 4.0 is not below high_freq_factor 4.0"),
    (scaled(**LLAMA3 | {"low_freq_factor": 9.0}), "low_freq_factor 9.0 is not below high_freq_factor 4.0"),
    (scaled(**LLAMA3 | {"low_freq_factor": None}), "low_freq_factor is None"),
    (scaled(**LLAMA3 | {"high_freq_factor": "4"}), "high_freq_factor is '4'"),
    (scaled(**LLAMA3 | {"factor": None}), "factor is None"),
    (scaled(**LLAMA3 | {"original_max_position_embeddings": 0}), "original_max_position_embeddings is 0"),
    (scaled(**LLAMA3 | {"original_max_position_embeddings": 0.5}), "is 0.5 in the rope parameters; a whole"),
    (scaled(**LLAMA3 | {"original_max_position_embeddings": "32"}), "max_position_embeddings is '32'"),
    (scaled(**YARN | {"factor": None}), "factor is None"),
    (scaled(**YARN | {"attention_factor": -1.0}), "attention_factor is -1.0"),
    (scaled(**YARN | {"beta_fast": NAN}), "beta_fast is nan"),
    (scaled(**YARN | {"beta_slow": "1"}), "beta_slow is '1'"),
    (scaled(**YARN | {"mscale": "x", "mscale_all_dim": 1.0}), "mscale is 'x'"),
    (scaled(**YARN | {"mscale": 1.0, "mscale_all_dim": [1]}), "mscale_all_dim is [1]"),
    (scaled(**YARN | {"truncate": "yes"}), "truncate is 'yes' in the rope parameters; true or false"),
    (scaled(**YARN | {"factor": 1e11}), "n_positions is 3200000000000; a whole number from 1 to 2147483647"),
    (scaled(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported; only 1.0 is"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 is not supported"),
    ({"partial_rotary_factor": "1"}, "partial_rotary_factor '1' is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between kinds of layers"),
    ({"rope_parameters": {"full_attention": YARN, "sliding_attention": LLAMA3}}, "differ between kinds of"),
    ({"rope_parameters": [YARN]}, "rope_parameters is [{"),
    ({"rope_parameters": 5}, "rope_parameters is 5; an object is needed"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; an object is needed"),
]  # fmt: skip

SHAPES = [
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "n_heads 6 is not a multiple of n_kv_heads 4"),
    ({"num_key_value_heads": 0}, "n_kv_heads is 0"),
    ({"num_key_value_heads": 12}, "n_heads 6 is not a multiple of n_kv_heads 12"),
    ({"num_key_value_heads": 2.0}, "n_kv_heads is 2.0; a whole number"),
    ({"head_dim": 7}, "head_dim is 7; rotary embeddings need an even one"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": -8}, "head_dim is -8"),
    ({"head_dim": "8"}, "head_dim is '8'"),
    ({"head_dim": None, "num_attention_heads": 5}, "d_model 48 is not a multiple of n_heads 5"),
    ({"num_hidden_layers": 0}, "n_layers is 0"),
    ({"num_hidden_layers": 10**9}, "n_layers is 1000000000; a whole number from 1 to 4096"),
    ({"hidden_size": True}, "d_model is True"),
    ({"hidden_size": HUGE}, f"d_model is {HUGE}"),
    ({"intermediate_size": None}, "config.json lacks intermediate_size"),
    ({"intermediate_size": [56]}, "d_ff is [56]"),
    ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
    ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ({"max_position_embeddings": 0}, "n_positions is 0"),
    ({"max_position_embeddings": 1e3}, "n_positions is 1000.0"),
    ({"rms_norm_eps": 0}, "norm_eps is 0"),
    ({"rms_norm_eps": NAN}, "norm_eps is nan"),
    ({"rms_norm_eps": "1e-6"}, "norm_eps is '1e-6'"),
    ({"rms_norm_eps": None}, "norm_eps is None"),
    ({"tie_word_embeddings": 1}, "tie_embeddings is 1; true or false"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; 'silu' is"),
    ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; token ids"),
    ({"eos_token_id": [1, 2.0]}, "eos_token_id is 2.0"),
    ({"eos_token_id": [1, -1]}, "eos_token_id is -1"),
    ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
    ({"eos_token_id": [HUGE]}, f"eos_token_id is {HUGE}"),
    ({"dtype": "int4"}, "dtype 'int4' is not supported; float32, float16, bfloat16, float64 are"),
    ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
    ({"dtype": ["float16"]}, "dtype ['float16'] is not supported"),
    ({"dtype": {"text": "float16"}}, "dtype {'text': 'float16'} is not supported"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "the checkpoint is quantised"),
    ({"quantization_config": {}}, "the checkpoint is quantised"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"), ANGLES + SHAPES, ids=[words[:50] for _, words in ANGLES + SHAPES]
)
def test_a_bad_field_is_refused_by_every_rotary_family(change, words):
    for family in ROTARY:
        refused(sizes(family) | {"model_type": family} | change, words)


OWN = [
    ("mistral", {"sliding_window": 0}, "window is 0; a whole number from 1"),
    ("mistral", {"sliding_window": -4096}, "window is -4096"),
    ("mistral", {"sliding_window": "4096"}, "window is '4096'"),
    ("phi3", {"sliding_window": 0}, "window is 0"),
    ("phi3", {"sliding_window": 2.5}, "window is 2.5"),
    ("phi3", {"sliding_window": True}, "window is True"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "(longrope) are not supported"),
    ("phi3", {"rope_scaling": YARN}, "(longrope) are not supported"),
    ("qwen2", {"use_sliding_window": None}, "use_sliding_window is None; true or false is needed"),
    ("qwen3", {"use_sliding_window": 1}, "use_sliding_window is 1; true or false is needed"),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers is -1; a whole number",
    ),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1.0}, "max_window_layers is 1.0"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "window is 0"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": "7"}, "window is '7'"),
    ("qwen3", {"attention_bias": True}, "attention_bias True is not supported"),
    ("llama", {"attention_bias": "no"}, "attention_bias is 'no'; true or false is needed"),
    ("llama", {"mlp_bias": True}, "mlp_bias True is not supported"),
]


WINDOWED_BY_LAYER = ["mistral", "qwen2", "qwen3"]
ONE_OF_EACH = (
    "1 layers of full_attention mixed with 1 of sliding_attention are not supported; all layers must be"
)
LAYER_TYPES = [
    (["full_attention", "sliding_attention"], ONE_OF_EACH),
    (["sliding_attention", "full_attention"], ONE_OF_EACH),
    (["sliding_attention"], "layer_types has 1; a list of 2 kinds, one a layer, is needed"),
    (["full_attention"] * 3, "layer_types has 3; a list of 2"),
    ([], "layer_types has 0; a list"),
    ("full_attention", "layer_types is 'full_attention'; a list"),
    ({"0": "full_attention"}, "layer_types is {'0'"),
    (["full_attention", "chunked_attention"], "'chunked_attention', which is not supported; full_attention"),
    (["full_attention", None], "layer_types name None, which is not supported"),
    ([["full_attention"], 5], "layer_types name ['full_attention'], which"),
]  # fmt: skip


@pytest.mark.parametrize("family", WINDOWED_BY_LAYER)
@pytest.mark.parametrize(("kinds", "words"), LAYER_TYPES, ids=[words[:40] for _, words in LAYER_TYPES])
def test_layers_of_two_kinds_or_of_unknown_ones_are_refused(family, kinds, words):
    fields = {"layer_types": kinds, "sliding_window": 7, "use_sliding_window": True}
    refused(sizes(family) | {"model_type": family} | fields, words)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_on_the_last_layers_only_is_refused(family):
    fields = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    refused(sizes(family) | {"model_type": family} | fields, ONE_OF_EACH)


@pytest.mark.parametrize("family", WINDOWED_BY_LAYER)
def test_sliding_layers_without_a_window_are_refused(family):
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}
    refused(sizes(family) | {"model_type": family} | fields, "but there is no sliding_window in use")


@pytest.mark.parametrize(("family", "change", "words"), OWN)
def test_a_bad_field_of_its_own_is_refused_by_a_family(family, change, words):
    refused(sizes(family) | {"model_type": family} | change, words)


NUMBERED = [
    {name: 10**4000}
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "eos_token_id",
        "tie_word_embeddings", "dtype", "hidden_act", "rope_theta", "rope_parameters",
        "partial_rotary_factor",
    )
]  # fmt: skip
NUMBERED += [scaled(**YARN | {name: 10**4000}) for name in ("factor", "beta_fast", "truncate", "rope_type")]


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("change", NUMBERED, ids=[" ".join(change) for change in NUMBERED])
def test_a_number_of_thousands_of_digits_is_told_by_its_size(family, change):
    with pytest.raises(CheckpointError) as caught:
        read_arch(sizes(family) | {"model_type": family} | change)
    assert "an integer of 13288 bits" in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("length", ["128", [128], {"a": 1}, True], ids=str)
def test_a_context_that_is_no_number_is_refused_where_yarn_would_stretch_it(length):
    fields = {"model_type": "llama", "max_position_embeddings": length}
    refused(sizes("llama") | fields | scaled(**YARN), f"n_positions is {length!r}; a whole number")


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"]
)
def test_a_missing_field_is_named(name):
    for family in ROTARY:
        fields = {key: value for key, value in sizes(family).items() if key != name}
        refused(fields | {"model_type": family}, f"config.json lacks {name}")


@pytest.mark.parametrize("kind", ["mamba", "", None, 5, [], {}, "Llama", "gpt2\nllama"], ids=str)
def test_an_unknown_family_is_told_the_supported_ones(kind):
    refused(sizes("llama") | {"model_type": kind}, f"model_type {kind!r} is not supported; ", *FAMILIES)


def test_a_table_of_angles_that_no_memory_holds_is_refused_before_it_is_made(tmp_path):
    their_model("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"head_dim": 2048, "num_key_value_heads": 1}))
    with pytest.raises(CheckpointError, match="take .* GB with 2,147,483,647 positions; device 'cpu' has"):
        dummy_model(str(tmp_path), CPU, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(header_of(10_000_000))
    with pytest.raises(CheckpointError, match="2,147,483,647 positions; device 'cpu' has"):
        load_model(str(tmp_path), CPU, torch.float32)


def header_of(n_bytes: int) -> bytes:
    """A safetensors file of one tensor, of that many bytes."""
    tensor = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}
    header = json.dumps({"x": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(n_bytes)


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": ["a"]}', '{"eos_token_id": 1.5}', "[]", "{", '{"eos_token_id": -1}']
)
def test_a_bad_generation_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps(sizes("llama") | {"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


# Fuzzing: whatever stands in a config, it is a shape that can be written and tabulated, or it is refused.

NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    2**31 - 1,
    2**31,
    HUGE,
    10**400,
    0.0,
    -1.5,
    1.5,
    1e-320,
    1e308,
    INFINITE,
    NAN,
]
OTHERS = [None, True, False, "", "yarn", "linear", "2", "\n", [], {}, [1], ["a"], {"factor": 2.0}]
WINDOW = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
CONFIGS = [
    sizes(family) | {"model_type": family, "dtype": "bfloat16"} | WINDOW | rope
    for family in ROTARY
    for rope in ({}, scaled(**YARN), scaled(**LLAMA3), {"rope_scaling": {"type": "linear", "factor": 2.0}})
]


@st.composite
def spoilt(draw: st.DrawFn) -> dict[str, Any]:
    """A config with one to three fields changed, at the top or among those of the angles."""
    config = deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 3))):
        inner = [value for value in config.values() if isinstance(value, dict) and value]
        fields = draw(st.sampled_from([config, *inner]))
        fields[draw(st.sampled_from(sorted(fields)))] = draw(st.sampled_from(NUMBERS + OTHERS))
    return config


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(config=spoilt())
def test_whatever_stands_in_a_config_is_a_shape_with_finite_angles_or_refused(config):
    try:
        arch = read_arch(config)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    assert read_arch(json.loads(json.dumps(write_arch(arch)))) == arch
    assert arch.n_parameters > 0 and finite_angles(arch)


def finite_angles(arch: Arch) -> bool:
    if arch.rope is None or arch.head_dim > 4096:
        return True
    return bool(arch.rope.table(4, arch.head_dim, CPU).isfinite().all())
