"""Every family against ``transformers``: logits, greedy choices, files in both directions, sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rosellm.models.arch import Arch, Norm
from rosellm.models.checkpoint import load_config
from rosellm.models.families.family import FULL, SLIDING
from rosellm.models.families.table import FAMILIES, KNOWN_SHAPES, read_arch, write_arch
from rosellm.models.rope import Rope
from rosellm.models.weights import save_model
from tests.helpers import random_model, small_config
from tests.models import family_checks as check
from tests.models.family_checks import loaded, sizes, their_model

ROTARY = [family for family in FAMILIES if family != "gpt2"]
SCALED = [family for family in ROTARY if family != "phi3"]  # transformers' has longrope only
WINDOWED = ["mistral", "phi3"]


def heads(n_heads: int, n_kv_heads: int) -> dict[str, int]:
    return {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}


SHAPES = {
    "group-1": heads(4, 4),
    "group-3": heads(6, 2),
    "group-8": heads(8, 1),
    "tied": {"tie_word_embeddings": True, "vocab_size": 197},
    "one-layer": {"num_hidden_layers": 1, "intermediate_size": 33, "rms_norm_eps": 1e-3},
    "wide-heads": {"head_dim": 22},
}
GPT2_SHAPES = {
    "one-head": {"n_head": 1},
    "wide": {"n_embd": 60, "n_head": 12, "n_inner": None},
    "untied": {"tie_word_embeddings": False, "vocab_size": 197},
    "one-layer": {"n_layer": 1, "layer_norm_epsilon": 1e-3},
}
OF_FAMILIES = {f"{family}-{name}": (family, SHAPES[name]) for family in ROTARY for name in SHAPES}
OF_FAMILIES |= {f"gpt2-{name}": ("gpt2", fields) for name, fields in GPT2_SHAPES.items()}
OF_FAMILIES |= {"llama-all-biases": ("llama", {"attention_bias": True})}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 777.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 500.0,
    },
    "yarn": YARN,
    "yarn-amplitude": YARN | {"attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-one-mscale": YARN | {"mscale": 0.7},
    "yarn-beta": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "rope_theta": 300.0},
    "yarn-exact": YARN | {"truncate": False},
    "yarn-unscaled": YARN | {"factor": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields"), OF_FAMILIES.values(), ids=OF_FAMILIES)
def test_logits_and_sizes_equal_those_of_transformers(tmp_path, family, fields):
    theirs = their_model(family, **fields)
    ours = loaded(theirs, tmp_path)
    check.check_equal(theirs, ours)
    assert ours.config.family == family and ours.config.eos_token_ids == (5,)
    assert ours.config.n_parameters == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", SCALED)
def test_every_kind_of_rotary_embedding_equals_transformers_beyond_the_original_context(
    tmp_path, family, rope
):
    parameters = {"rope_theta": 10_000.0} | ROPES[rope]
    theirs = their_model(family, rope_parameters=parameters, head_dim=16)
    check.check_equal(theirs, loaded(theirs, tmp_path), length=120)


@pytest.mark.parametrize("window", [1, 7, 99, 100, None])
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_below_and_above_the_prompts_length_equal_transformers(tmp_path, family, window):
    theirs = their_model(family, sliding_window=window)
    ours = loaded(theirs, tmp_path)
    assert ours.config.window == window
    check.check_equal(theirs, ours)


BOTH = {"sliding_window": 7, "use_sliding_window": True}
SPELLINGS = {
    "full in a list": ({"layer_types": [FULL] * 2} | BOTH, None),
    "sliding in a list": ({"layer_types": [SLIDING] * 2} | BOTH, 7),
    "none full": (BOTH | {"max_window_layers": 0}, 7),
    "as many full as there are": (BOTH | {"max_window_layers": 2}, None),
    "no width": ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
    "not in use": ({"sliding_window": 7, "max_window_layers": 0}, None),
    "the list counts": (BOTH | {"max_window_layers": 0, "layer_types": [FULL] * 2}, None),
}


@pytest.mark.parametrize(("fields", "window"), SPELLINGS.values(), ids=SPELLINGS)
def test_layers_of_one_kind_have_one_window_however_a_config_says_it(fields, window):
    assert read_arch(sizes("qwen3") | {"model_type": "qwen3"} | fields).window == window


# Files


def _arch(family: str, rope: Rope | None = None, **changes) -> Arch:
    """A small shape of that family, with its parts."""
    arch = read_arch(sizes(family) | {"model_type": family})
    return replace(arch, rope=rope or arch.rope, **changes)


YARN_ROPE = Rope(500.0, "yarn", 4.0, 32, attention_factor=1.3, beta_fast=8.0, beta_slow=2.0, truncate=False)
ARCHES = {family: _arch(family, eos_token_ids=(3, 9)) for family in FAMILIES} | {
    "linear": _arch("llama", Rope(99.0, "linear", 2.5), norm=Norm("rms", 1e-4), eos_token_ids=()),
    "llama3": _arch("qwen3", Rope(500.0, "llama3", 8.0, 32, 1.0, 4.0)),
    "yarn": _arch("qwen2", YARN_ROPE),
    "tied": _arch("qwen3", tie_embeddings=True, head_dim=10, scale=None),
    "biases": _arch("llama", biases=("qkv", "out")),
    "window": _arch("phi3", window=7),
    "window of qwen2": _arch("qwen2", window=7),
    "window of qwen3": _arch("qwen3", window=7),
}


@pytest.mark.parametrize("name", ARCHES)
def test_what_is_saved_loads_in_transformers_and_comes_back(tmp_path, name):
    from transformers import AutoModelForCausalLM

    ours = random_model(0, ARCHES[name])
    save_model(ours, tmp_path / "ours", torch.float32)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    check.check_equal(theirs.eval(), ours)
    again = loaded(theirs, tmp_path / "theirs")
    assert again.config == ours.config and again.config.dtype == "float32"
    weights = again.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("arch", KNOWN_SHAPES.values(), ids=KNOWN_SHAPES)
def test_a_known_shape_survives_its_own_spelling_and_that_of_transformers(arch):
    from transformers import AutoConfig

    fields = write_arch(arch)
    assert read_arch(fields) == arch
    assert read_arch(AutoConfig.for_model(**fields).to_dict()) == arch


def test_the_end_of_text_tokens_of_generation_outrank_the_configs(tmp_path):
    save_model(random_model(0, ARCHES["llama"]), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 1]}')
    assert load_config(tmp_path).eos_token_ids == (7, 2, 1)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_config(tmp_path).eos_token_ids == (3, 9)


# config.json


GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_positions": 64, "n_layer": 2, "n_head": 2, "n_embd": 32}


def test_a_sparse_config_takes_gpt2s_defaults():
    assert read_arch(GPT2 | {"n_inner": None}) == small_config(d_ff=128, n_kv_heads=2, norm=Norm(eps=1e-5))


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        *(({"eos_token_id": ids}, "eos_token_ids", ()) for ids in (None, [])),
        ({}, "eos_token_ids", ()),
        ({"eos_token_id": 7}, "eos_token_ids", (7,)),
        ({"eos_token_id": [7, 0]}, "eos_token_ids", (7, 0)),
        *(({name: "bfloat16"}, "dtype", "bfloat16") for name in ("dtype", "torch_dtype")),
        *(({name: None}, "dtype", None) for name in ("dtype", "torch_dtype")),
    ],
    ids=str,
)
def test_a_config_names_ends_of_text_and_its_dtype_in_several_ways(given, field, value):
    assert getattr(read_arch(GPT2 | given), field) == value


@pytest.mark.parametrize("family", ROTARY)
def test_a_sparse_config_takes_transformers_defaults(family):
    from transformers import AutoConfig

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    given = {name: sizes(family)[name] for name in names} | {"num_attention_heads": 64, "hidden_size": 256}
    full = AutoConfig.for_model(family, **given).to_dict() | {"eos_token_id": None}
    assert read_arch({"model_type": family} | given) == read_arch(full)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", ROPES)
def test_the_older_spelling_of_rotary_embeddings_reads_as_the_newer_one(rope, key):
    from transformers import AutoConfig

    base = sizes("llama") | {"model_type": "llama"}
    newer = base | {"rope_parameters": {"rope_theta": 10_000.0} | ROPES[rope]}
    parameters = newer["rope_parameters"]
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "rope_type")}
    scaling |= {key: parameters["rope_type"]}
    older = base | {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}
    assert read_arch(older) == read_arch(newer)
    assert read_arch(AutoConfig.for_model(**json.loads(json.dumps(older))).to_dict()) == read_arch(newer)


def test_yarn_makes_room_for_the_positions_that_it_stretches_to():
    """Qwen's files keep the original context in max_position_embeddings when they are told to use YaRN."""
    base = sizes("qwen2") | {"model_type": "qwen2"}
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_arch(base | {"rope_scaling": stretched}).n_positions == 512
    assert read_arch(base | {"rope_scaling": stretched | {"factor": 0.5}}).n_positions == 128
