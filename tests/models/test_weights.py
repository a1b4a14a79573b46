"""Checkpoints: every layout that Hugging Face writes loads, everything broken is refused with one error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from rosellm.errors import CheckpointError
from rosellm.models.checkpoint import checkpoint_folder, load_config
from rosellm.models.families.table import FAMILIES, KNOWN_SHAPES
from rosellm.models.model import Transformer
from rosellm.models.weights import dummy_model, load_model, save_model
from tests.helpers import CPU, DTYPES, random_model, random_prompts, small_config, uncached_logits

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WPE = "transformer.wpe.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good checkpoint, to be spoilt."""
    save_model(random_model(0), tmp_path, torch.float32)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(str(folder), CPU, dtype)


def same(a: Transformer, b: Transformer) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def rewrite(folder: Path, change) -> None:
    changed = change(load_file(folder / WEIGHTS))
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_saved_model_loads_again(tmp_path, dtype, tie):
    gpt = random_model(0, small_config(tie_embeddings=tie, eos_token_ids=(5,))).to(dtype)
    save_model(gpt, tmp_path / "new" / "folder", dtype)
    again = load(tmp_path / "new" / "folder", dtype)
    assert again.config == gpt.config
    assert same(again, gpt)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
def test_stored_values_are_converted_to_the_dtype_wanted(tmp_path, stored, wanted):
    gpt = random_model(0)
    save_model(gpt, tmp_path, stored)
    again = load(tmp_path, wanted)
    assert again.dtype == wanted
    assert torch.equal(again.blocks[1].up.weight, gpt.blocks[1].up.weight.to(stored).to(wanted))


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one-file", "shards"])
def test_what_transformers_saves_gives_its_logits(tmp_path, shard_size, dtype, tie):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 101, "n_positions": 64, "n_layer": 2, "n_head": 2, "n_embd": 32}
    theirs = (
        GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.3, tie_word_embeddings=tie)).to(dtype).eval()
    )
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "20KB")
    (prompt,) = random_prompts([20])
    with torch.inference_mode():
        expected = theirs.float()(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(uncached_logits(load(tmp_path), prompt), expected, rtol=1e-4, atol=1e-4)


def test_what_we_save_loads_in_transformers_without_a_missing_tensor(folder):
    from transformers import GPT2LMHeadModel

    _, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())


def test_names_load_without_the_transformer_prefix(folder):
    expected = load(folder)
    rewrite(folder, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    assert same(load(folder), expected)


def test_tensors_that_the_model_has_not_are_left_alone(folder):
    expected = load(folder)
    extra = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "score.weight": torch.tensor(torch.nan)}
    rewrite(folder, lambda tensors: tensors | extra)
    assert same(load(folder), expected)


Tensors = dict[str, torch.Tensor]
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_buffers(tensors: Tensors) -> Tensors:
    """The causal masks that files of transformers 2 to 4 carry."""
    layers = [name.removesuffix("c_attn.weight") for name in tensors if name.endswith("attn.c_attn.weight")]
    mask = torch.ones(64, 64, dtype=torch.uint8).tril()[None, None]
    return (
        tensors
        | {f"{layer}bias": mask.clone() for layer in layers}
        | {f"{layer}masked_bias": torch.tensor(-1e4) for layer in layers}
    )


def with_another_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[WTE].flip(0).contiguous()}


def with_the_same_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[WTE].clone()}


def with_the_head_alone(tensors: Tensors) -> Tensors:
    """What ``safetensors.torch.save_model`` keeps of two names for one tensor."""
    return with_the_same_head(tensors) | {WTE: None}


def mixed(tensors: Tensors) -> Tensors:
    return {name: t.to(DTYPES[i % 3]) for i, (name, t) in enumerate(sorted(tensors.items()))}


HUB_SHAPES = {
    "prefixed": (),
    "bare": (bare,),
    "bare-buffers": (with_buffers, bare),
    "buffers": (with_buffers,),
    "another-head": (with_another_head,),
    "another-head-bare": (with_another_head, bare),
    "same-head": (with_the_same_head,),
    "head-alone": (with_the_head_alone,),
    "mixed-dtypes": (mixed,),
}


@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "shards"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HUB_SHAPES)
def test_a_checkpoint_in_any_of_the_hubs_shapes_gives_the_logits_of_transformers(
    tmp_path, shape, dtype, shards
):
    from transformers import GPT2LMHeadModel

    save_model(random_model(0, small_config(eos_token_ids=(5,))), tmp_path, dtype)
    for change in HUB_SHAPES[shape]:
        rewrite(tmp_path, change)
    if shards:
        split(tmp_path)
    theirs, report = GPT2LMHeadModel.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    (prompt,) = random_prompts([20])
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([prompt])).logits[0]
    ours = load(tmp_path)
    assert ours.config.tie_embeddings == (not shape.startswith("another-head"))
    torch.testing.assert_close(uncached_logits(ours, prompt), expected, rtol=1e-5, atol=1e-5)


def test_an_untied_head_is_another_than_the_embedding(tmp_path):
    """Else the heads of the test above could be mistaken for one another."""
    save_model(random_model(0), tmp_path)
    tied = load(tmp_path)
    rewrite(tmp_path, with_another_head)
    (prompt,) = random_prompts([20])
    logits, others = uncached_logits(tied, prompt), uncached_logits(load(tmp_path), prompt)
    torch.testing.assert_close(others, logits.flip(-1), rtol=1e-5, atol=1e-5)
    assert (others - logits).abs().max() > 1


def split(folder: Path) -> dict:
    """Turn the checkpoint into two shards; the index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def test_a_model_saved_over_shards_is_the_one_that_loads(folder):
    split(folder)
    latest = random_model(7, load(folder).config)
    save_model(latest, folder, torch.float32)
    assert (folder / INDEX).exists() and same(load(folder), latest)


def test_shards_load_as_one_file_does(folder):
    expected = load(folder)
    split(folder)
    assert same(load(folder), expected)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: {name: t for name, t in tensors.items() if name != WPE})
    refused(folder, f"lacks 1 tensors, the first is {WPE}")


def test_a_missing_head_of_an_untied_model_is_named(tmp_path):
    save_model(random_model(0, small_config(tie_embeddings=False)), tmp_path)
    rewrite(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    refused(tmp_path, "lm_head.weight")


@pytest.mark.parametrize("shape", [(63, 32), (64, 31), (32, 64), (64 * 32,), (1, 64, 32)], ids=str)
def test_a_wrong_shape_is_told(folder, shape):
    rewrite(folder, lambda tensors: tensors | {WPE: torch.zeros(shape)})
    refused(folder, WPE, f"shape {list(shape)}", "[64, 32]")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(folder, bad):
    def spoil(tensors):
        tensors[WPE][3, 4] = bad
        return tensors

    rewrite(folder, spoil)
    refused(folder, WPE, "not finite")


def test_integer_weights_are_refused(folder):
    rewrite(folder, lambda tensors: tensors | {WPE: torch.zeros(64, 32, dtype=torch.int32)})
    refused(folder, WPE)


@pytest.mark.parametrize(
    "kept", [0, 4, 100, 0.5, -1], ids=["empty", "4-bytes", "100-bytes", "half", "all-but-one"]
)
def test_a_truncated_file_is_refused(folder, kept):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    refused(folder, "safetensors")


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60, b"{}"], ids=["garbage", "zip", "json"]
)
def test_a_file_of_another_kind_is_refused(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    refused(folder, "cannot be read as safetensors")


def test_a_pickle_under_a_safetensors_name_is_refused_and_not_run(folder):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (folder / "sprung",))

    torch.save({WPE: Trap()}, folder / WEIGHTS)
    refused(folder, "cannot be read as safetensors")
    assert not (folder / "sprung").exists()


def test_a_checkpoint_with_pickled_weights_only_is_refused(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "lacks 'model.safetensors' (only safetensors files")


def test_a_missing_shard_is_named(folder):
    split(folder)
    (folder / "b.safetensors").unlink()
    refused(folder, "lacks 'b.safetensors' (only")


def test_an_index_that_reaches_outside_its_folder_is_refused(folder):
    index = split(folder)
    index["weight_map"][WPE] = "../b.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "lacks '../b.safetensors' (only")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 5}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {}}',
    ],
)
def test_a_bad_index_is_refused(folder, text):
    split(folder)
    (folder / INDEX).write_text(text)
    refused(folder, str(folder))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '{"model_type": "gpt2"}', "{'a': 1}"])
def test_a_bad_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_a_config_that_is_no_text_is_refused(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, "config.json")


def test_a_config_of_another_family_is_refused(folder):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "mamba"}))
    refused(folder, "'mamba'", *FAMILIES)


def test_a_folder_without_a_config_is_refused(tmp_path):
    refused(tmp_path, "has no config.json")


@pytest.mark.parametrize("name", ["no/such-model-anywhere", "/no/such/folder", "not a hub id!"])
def test_a_model_that_cannot_be_had_names_the_ways_out(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_folder(name)
    assert "\n" not in str(caught.value)
    assert all(way in str(caught.value) for way in (name, "rose-tiny", "local folder", "load_format='dummy'"))


@pytest.mark.slow
def test_a_lost_network_is_told_as_such():
    look_up = "from rosellm.models.checkpoint import checkpoint_folder; checkpoint_folder('no/such-model')"
    for variables, told in (
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "from the hub (no network, and it is not cached); use"),
        ({"HF_HUB_OFFLINE": "1"}, "from the hub (HF_HUB_OFFLINE is set, and it is not cached); use"),
    ):
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | variables
        done = subprocess.run(
            [sys.executable, "-c", look_up], env=environment, capture_output=True, text=True, timeout=120
        )
        assert told in done.stderr.splitlines()[-1]


def test_from_the_hub_come_weights_as_safetensors_and_text_and_no_code(monkeypatch):
    files = (
        "chat_template.jinja config.json merges.txt model-00001-of-00002.safetensors "
        "model.safetensors.index.json vocab.json"
    )
    others = (
        "pytorch_model.bin tf_model.h5 modeling_gpt2.py rust_model.ot model.onnx README.md 64.tflite "
        "consolidated.safetensors fp16/model.safetensors adapter/adapter_model.safetensors"
    )
    fetched = []

    def fetch(name, **patterns):
        fetched.extend(filter_repo_objects([*files.split(), *others.split()], **patterns))
        return f"/cache/{name}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert checkpoint_folder("openai-community/gpt2") == Path("/cache/openai-community/gpt2")
    assert fetched == files.split()


def test_whatever_the_hub_client_fails_with_is_told_in_one_line(monkeypatch):
    class ProxyError(Exception):
        """As httpx's: no OSError."""

    def fail(*_args, **_options):
        raise ProxyError("407\nProxy Authentication Required")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"^model 'gpt2' .*\(ProxyError\); use 'rose-tiny'.*dummy'$"):
        checkpoint_folder("gpt2")


def test_a_dummy_model_has_the_real_shape_and_seeded_weights(folder):
    a, b, c = (dummy_model(str(folder), CPU, torch.float16, seed) for seed in (0, 0, 1))
    assert a.config == load_config(folder) and a.dtype == torch.float16
    assert same(a, b) and not same(a, c)


def test_a_dummy_model_of_a_known_name_has_its_shape(monkeypatch):
    monkeypatch.setitem(KNOWN_SHAPES, "gpt2", small_config(n_layers=3))
    assert dummy_model("gpt2", CPU, torch.float16).config is KNOWN_SHAPES["gpt2"]


def test_a_dummy_model_of_an_unknown_shape_is_refused():
    with pytest.raises(CheckpointError, match="'who/knows'.*gpt2-xl"):
        dummy_model("who/knows", CPU, torch.float16)
