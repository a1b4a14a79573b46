"""How weights are loaded: joined across shards, within the model's memory, with a bar if there are many."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosellm.errors import CheckpointError, describe
from rosellm.models import weights
from rosellm.models.families.table import read_arch
from rosellm.models.model import Transformer
from rosellm.models.weights import load_model, save_model
from tests.models.family_checks import CPU, loaded, our_logits, prompt, sizes, their_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of a rotary family."""
    their_model("qwen2").save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> Transformer:
    return load_model(str(folder), CPU, torch.float32)


def spread(folder: Path, n_shards: int) -> dict[str, str]:
    """Deal the tensors out to shards, so that those of a joined weight are apart; the index's map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    where = {name: f"{i % n_shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in sorted(set(where.values())):
        save_file({name: tensors[name] for name in tensors if where[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def same(a: Transformer, b: Transformer) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


@pytest.mark.parametrize("n_shards", [2, 5, 26])
def test_joined_weights_load_from_whichever_shards_hold_their_parts(folder, n_shards):
    expected = load(folder)
    where = spread(folder, n_shards)
    assert len({where[name] for name in (Q, K, V)}) > 1
    assert same(load(folder), expected)


def test_joined_rows_are_those_of_q_k_and_v_and_of_gate_and_up(folder):
    tensors = load_file(folder / WEIGHTS)
    block = load(folder).blocks[0]
    mlp = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(block.qkv.weight, torch.cat([tensors[name] for name in (Q, K, V)]))
    assert torch.equal(block.up.weight, torch.cat(mlp))


def test_what_transformers_shards_gives_its_logits(tmp_path):
    theirs = their_model("llama", tie_word_embeddings=True)
    expected = our_logits(loaded(theirs, tmp_path / "one"), prompt(20))
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(our_logits(load(tmp_path / "many"), prompt(20)), expected)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_shard_without_a_tensor_that_the_index_puts_there_is_refused(folder):
    shard = folder / spread(folder, 3)[K]
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != K}, shard)
    refused(folder, f"lacks 1 tensors, the first is {K}")


def test_a_missing_shard_is_named(folder):
    shard = spread(folder, 3)[K]
    (folder / shard).unlink()
    refused(folder, f"lacks {shard!r}")


def test_of_many_missing_shards_the_first_are_named(folder):
    where = spread(folder, 3)
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in where}}))
    refused(folder, f" and {len(where) - 3} more (only safetensors files in the folder are read)")


@pytest.mark.parametrize("name", ["a" * 256, "é" * 128, "a" * 5000, "", "a\nb", "a\0b", "\ud800"], ids=ascii)
def test_an_index_that_names_a_file_which_cannot_exist_is_refused_in_a_short_line(folder, name):
    where = spread(folder, 3)
    (folder / INDEX).write_text(json.dumps({"weight_map": where | {K: name}}))
    refused(folder, "(only safetensors files in the folder are read)")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert len(str(caught.value)) < len(str(folder)) + 300


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, "a b.safetensors"], ids=ascii)
def test_a_missing_shard_of_any_name_that_a_file_may_have_is_named(folder, name):
    where = spread(folder, 3)
    (folder / INDEX).write_text(json.dumps({"weight_map": where | {K: name}}))
    refused(folder, f"lacks {describe(name)} (only")


@pytest.mark.parametrize(
    "name", ["../0.safetensors", "/0.safetensors", "a/0.safetensors", "a/../0.safetensors"]
)
def test_an_index_that_names_a_file_elsewhere_is_refused(folder, name):
    where = spread(folder, 3)
    (folder / INDEX).write_text(json.dumps({"weight_map": where | {K: name}}))
    refused(folder, f"lacks {name!r} (only")


@pytest.mark.parametrize(
    "name", [Q, "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.bias"]
)
def test_a_part_of_a_joined_weight_of_another_shape_is_told(folder, name):
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = tensors[name][:-1].clone()
    shape = list(tensors[name].shape)
    save_file(tensors, folder / WEIGHTS)
    refused(folder, name, f"shape {shape}", f"asks for {[shape[0] + 1, *shape[1:]]}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_tensors_are_refused_by_their_dtype(folder, dtype):
    """Packed ones have other shapes too; what is wrong is the dtype."""
    tensors = load_file(folder / WEIGHTS)
    tensors[Q] = torch.zeros(len(tensors[Q]) // 2, tensors[Q].shape[1], dtype=dtype)
    save_file(tensors, folder / WEIGHTS)
    refused(folder, Q, f"is stored as {weights.dtype_name(dtype)}; use float32")


def test_a_bar_appears_for_a_large_checkpoint_only(folder, capsys, monkeypatch):
    load(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "PROGRESS_FROM", 1)
    load(folder)
    assert "weights: " in capsys.readouterr().err
    assert (folder / WEIGHTS).stat().st_size > weights.PROGRESS_FROM


MEASURED = """
import sys, threading
from pathlib import Path
import torch
from rosellm.models import shards, weights
from safetensors.torch import load_file

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while not done.is_set():
        seen.append(anonymous())
        done.wait(0.001)

folder, fault = sys.argv[1:]
whole = weights._copy_weights

def all_at_once(gpt, files, folder):
    held = [tensor.to(gpt.dtype) for file in set(files.values()) for tensor in load_file(file).values()]
    whole(gpt, files, folder)

def a_second_copy(gpt, files, folder):
    whole(gpt, files, folder)
    gpt.load_state_dict({name: tensor.clone() for name, tensor in gpt.state_dict().items()})

weights._copy_weights = {"none": whole, "all": all_at_once, "copy": a_second_copy}[fault]
done, seen = threading.Event(), [anonymous()]
threading.Thread(target=watch, daemon=True).start()
gpt = weights.load_model(folder, torch.device("cpu"), torch.float32)
done.set()
print(max(seen) - seen[0])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A checkpoint in float16, its bytes in float32, and those of its largest tensor."""
    folder = tmp_path_factory.mktemp("large")
    arch = read_arch(sizes("llama") | {"model_type": "llama"})
    shape = {"vocab_size": 4096, "d_model": 768, "d_ff": 2048, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64}
    arch = replace(arch, **shape, n_layers=4, tie_embeddings=True, scale=None)
    save_model(Transformer.allocate(arch, CPU, torch.float16).initialise(0), folder)
    return folder, 4 * arch.n_parameters, 4 * 4096 * 768


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "fits"), [("none", True), ("all", False), ("copy", False)])
def test_loading_needs_the_memory_of_the_weights_and_one_tensor(large, fault, fits):
    """Anonymous memory: the files' own pages are the page cache's, which gives them back."""
    folder, n_bytes, largest = large
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder), fault], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    peak, slack = int(done.stdout), 4 << 20
    assert n_bytes > 5 * (largest + slack)
    assert peak > 0.9 * n_bytes
    assert (peak <= n_bytes + largest + slack) == fits


def all_at_once(gpt: Transformer, files: dict[str, Path], folder: Path) -> None:
    tensors = (tensor for file in set(files.values()) for tensor in load_file(file).values())
    held = [tensor.to(gpt.device, gpt.dtype) for tensor in tensors]
    _copy_weights(gpt, files, folder)
    held.clear()


def a_second_copy(gpt: Transformer, files: dict[str, Path], folder: Path) -> None:
    _copy_weights(gpt, files, folder)
    gpt.load_state_dict({name: tensor.clone() for name, tensor in gpt.state_dict().items()})


_copy_weights = weights._copy_weights
WAYS = {"as it is": (_copy_weights, True), "all": (all_at_once, False), "copy": (a_second_copy, False)}


@pytest.mark.gpu
@pytest.mark.parametrize(("copy", "fits"), WAYS.values(), ids=WAYS)
def test_loading_shards_to_a_gpu_needs_the_memory_of_the_weights_and_one_tensor_there(
    large, copy, fits, tmp_path, monkeypatch
):
    """In bytes as asked for: what the allocator rounds up is not the loader's."""
    folder, n_bytes, largest = large
    sharded = shutil.copytree(folder, tmp_path / "sharded")
    assert len(set(spread(sharded, 5).values())) == 5
    monkeypatch.setattr(weights, "_copy_weights", copy)
    gpu = torch.device("cuda")
    torch.zeros(1, device=gpu)  # its context is there
    gc.collect()
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]
    gpt = load_model(str(sharded), gpu, torch.float32)
    peak = torch.cuda.memory_stats(gpu)["requested_bytes.all.peak"] - before
    assert gpt.device.type == "cuda"
    assert n_bytes <= peak
    assert (peak <= n_bytes + largest + (1 << 20)) == fits
