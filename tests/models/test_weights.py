"""Checkpoints: every layout that Hugging Face writes loads within the model's memory, bad ones are refused.

``tests/test_bad_input.py`` has more bad ones.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from rosellm.errors import CheckpointError
from rosellm.models.checkpoint import checkpoint_folder, load_config
from rosellm.models.model import Transformer
from rosellm.models.weights import dummy_model, load_model, save_model
from tests.helpers import CPU, DTYPES, FAMILIES, random_model, random_prompts, small_config, uncached_logits
from tests.models import family_checks
from tests.models.family_checks import their_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WPE, WTE, HEAD = "transformer.wpe.weight", "transformer.wte.weight", "lm_head.weight"
Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of GPT-2, to be spoilt."""
    save_model(random_model(0), tmp_path, torch.float32)
    return tmp_path


@pytest.fixture
def rotary(tmp_path: Path) -> Path:
    """A good checkpoint of a rotary family, whose q, k and v are apart."""
    their_model("qwen2").save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(str(folder), CPU, dtype)


def same(a: Transformer, b: Transformer) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def rewrite(folder: Path, change) -> None:
    """``change`` the tensors; those that become None are left out."""
    changed = change(load_file(folder / WEIGHTS))
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def spread(folder: Path, n_shards: int) -> dict[str, str]:
    """Deal the tensors out to shards; the index's map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    where = {name: f"{i % n_shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(where.values()):
        held = {name: tensors[name] for name in tensors if where[name] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def refused(folder: Path, *words: str) -> None:
    family_checks.refused(CheckpointError, words, load, folder)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
def test_a_saved_model_loads_again_in_the_dtype_wanted(tmp_path, stored, wanted, tie):
    gpt = random_model(0, small_config(tie_embeddings=tie, eos_token_ids=(5,)))
    save_model(gpt, tmp_path / "new" / "folder", stored)
    again = load(tmp_path / "new" / "folder", wanted)
    assert again.config == gpt.config and again.dtype == wanted and same(again, gpt.to(stored).to(wanted))


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_buffers(tensors: Tensors) -> Tensors:
    """The causal masks that files of transformers 2 to 4 carry, and a tensor of another use."""
    mask = torch.ones(64, 64, dtype=torch.uint8).tril()[None, None]
    others = {"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    return tensors | others | {"score.weight": torch.tensor(torch.nan)}


def with_the_head_alone(tensors: Tensors) -> Tensors:
    """What ``safetensors.torch.save_model`` keeps of two names for one tensor."""
    return tensors | {HEAD: tensors[WTE].clone(), WTE: None}


def with_another_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[WTE].flip(0).contiguous()}


def mixed(tensors: Tensors) -> Tensors:
    return {name: tensor.to(DTYPES[i % 3]) for i, (name, tensor) in enumerate(sorted(tensors.items()))}


HUB_SHAPES = {
    "prefixed": lambda tensors: tensors,
    "buffers": with_buffers,
    "bare-buffers": lambda tensors: bare(with_buffers(tensors)),
    "another-head": with_another_head,
    "another-head-bare": lambda tensors: bare(with_another_head(tensors)),
    "same-head": lambda tensors: tensors | {HEAD: tensors[WTE].clone()},
    "head-alone": with_the_head_alone,
    "head-alone-bare": lambda tensors: bare(with_the_head_alone(tensors)),
    "mixed-dtypes": mixed,
}


@pytest.mark.parametrize("n_shards", [0, 2], ids=["one-file", "shards"])
@pytest.mark.parametrize("shape", HUB_SHAPES)
def test_a_checkpoint_in_any_of_the_hubs_shapes_gives_the_logits_of_transformers(folder, shape, n_shards):
    from transformers import GPT2LMHeadModel

    rewrite(folder, HUB_SHAPES[shape])
    if n_shards:
        spread(folder, n_shards)
    theirs, report = GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    (prompt,) = random_prompts([20])
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([prompt])).logits[0]
    ours = load(folder)
    assert ours.config.tie_embeddings == (not shape.startswith("another-head"))
    torch.testing.assert_close(uncached_logits(ours, prompt), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_shards", [2, 26])
def test_joined_weights_load_from_whichever_shards_hold_their_parts(rotary, n_shards):
    tensors, expected = load_file(rotary / WEIGHTS), load(rotary)
    mlp = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(expected.blocks[0].qkv.weight, torch.cat([tensors[name] for name in (Q, K, V)]))
    assert torch.equal(expected.blocks[0].up.weight, torch.cat(mlp))
    where = spread(rotary, n_shards)
    assert len({where[name] for name in (Q, K, V)}) > 1
    assert same(load(rotary), expected)


def test_a_model_saved_over_shards_is_the_one_that_loads(folder):
    spread(folder, 2)
    latest = random_model(7, small_config())
    save_model(latest, folder, torch.float32)
    assert (folder / INDEX).exists() and same(load(folder), latest)


def test_a_shard_without_a_tensor_that_the_index_puts_there_is_refused(rotary):
    shard = rotary / spread(rotary, 3)[K]
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != K}, shard)
    refused(rotary, f"lacks 1 tensors, the first is {K}")


def of(*shards: str) -> str:
    return json.dumps({"weight_map": {WPE if i == 0 else str(i): shard for i, shard in enumerate(shards)}})


ONLY = "(only safetensors files in the folder are read)"
INDEXES = {
    **{
        text: "not a valid safetensors index" for text in ("", "[]", "{}", '{"weight_map": 5}', "[" * 100_000)
    },
    **{of(name): ONLY for name in ("gone.safetensors", "a" * 5000, "", "\ud800", "a/../0.safetensors")},
    of("config.json"): "config.json cannot be read as safetensors",
    of(*map("{}.safetensors".format, range(30))): "and others (only",
}


@pytest.mark.parametrize(("text", "told"), INDEXES.items(), ids=[text[:40] for text in INDEXES])
def test_a_bad_index_is_refused_in_a_short_line(folder, text, told):
    (folder / WEIGHTS).rename(folder / "0.safetensors")
    (folder / INDEX).write_text(text)
    refused(folder, told)


@pytest.mark.parametrize("name", [Q, "model.layers.1.mlp.up_proj.weight", V.replace("weight", "bias")])
def test_a_part_of_a_joined_weight_of_another_shape_is_refused(rotary, name):
    rewrite(rotary, lambda tensors: tensors | {name: tensors[name][:-1].clone()})
    n_rows, *columns = load_file(rotary / WEIGHTS)[name].shape
    refused(rotary, name, f"shape {[n_rows, *columns]}", f"asks for {[n_rows + 1, *columns]}")


def test_packed_tensors_are_refused_by_their_dtype(rotary):
    rewrite(rotary, lambda tensors: tensors | {Q: tensors[Q][::2].to(torch.uint8)})
    refused(rotary, Q, "is stored as uint8; use float32")


def test_a_pickle_is_refused_and_not_run(folder):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (folder / "sprung",))

    torch.save({WPE: Trap()}, folder / WEIGHTS)
    refused(folder, "cannot be read as safetensors")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "lacks 'model.safetensors' (only safetensors files")
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize("name", ["no/such-model-anywhere", "not a hub id!"])
def test_a_model_that_cannot_be_had_names_the_ways_out(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_folder(name)
    message = str(caught.value)
    assert "\n" not in message
    assert all(way in message for way in (name, "rose-tiny", "local folder", "load_format='dummy'"))


def test_from_the_hub_come_weights_as_safetensors_and_text_and_no_code(monkeypatch):
    files = ["chat_template.jinja", "config.json", "merges.txt", "model-00001-of-00002.safetensors", INDEX]
    others = ["pytorch_model.bin", "tf_model.h5", "modeling_gpt2.py", "model.onnx", "README.md"]
    others += ["consolidated.safetensors", "fp16/model.safetensors", "adapter/adapter_model.safetensors"]
    fetched = []

    def fetch(name, **patterns):
        fetched.extend(filter_repo_objects(files + others, **patterns))
        return f"/cache/{name}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert checkpoint_folder("openai-community/gpt2") == Path("/cache/openai-community/gpt2")
    assert fetched == files


def test_a_dummy_model_has_the_real_shape_and_seeded_weights(folder):
    a, b, c = (dummy_model(str(folder), CPU, torch.float16, seed) for seed in (0, 0, 1))
    assert a.config == load_config(folder) and a.dtype == torch.float16
    assert same(a, b) and not same(a, c)


# Memory


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A checkpoint in float16, in shards; its bytes in float32, and those of its largest tensor."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"vocab_size": 4096, "d_model": 768, "d_ff": 2048, "n_heads": 12, "n_kv_heads": 4, "n_layers": 4}
    arch = small_config(**FAMILIES["llama"] | shape, family="llama")
    save_model(Transformer.allocate(arch, CPU, torch.float16).initialise(0), folder)
    spread(folder, 5)
    return folder, 4 * arch.n_parameters, 4 * 4096 * 768


MEASURED = """
import sys, threading
import torch
from rosellm.models import weights

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while not done.is_set():
        seen.append(anonymous())
        done.wait(0.001)

done, seen = threading.Event(), [anonymous()]
threading.Thread(target=watch, daemon=True).start()
gpt = weights.load_model(sys.argv[1], torch.device("cpu"), torch.float32)
done.set()
print(max(seen) - seen[0])
"""


@pytest.mark.slow
def test_loading_needs_the_memory_of_the_weights_and_one_tensor(large):
    """Anonymous memory: the files' own pages are the page cache's, which gives them back."""
    folder, n_bytes, largest = large
    command = [sys.executable, "-c", MEASURED, str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, slack = int(done.stdout), 4 << 20
    assert n_bytes > 5 * (largest + slack)
    assert 0.9 * n_bytes < peak <= n_bytes + largest + slack


@pytest.mark.gpu
def test_loading_to_a_gpu_needs_the_memory_of_the_weights_and_one_tensor_there(large):
    """In bytes as asked for: what the allocator rounds up is not the loader's."""
    folder, n_bytes, largest = large
    gpu = torch.device("cuda")
    torch.zeros(1, device=gpu)  # its context is there
    gc.collect()
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]
    gpt = load_model(str(folder), gpu, torch.float32)
    peak = torch.cuda.memory_stats(gpu)["requested_bytes.all.peak"] - before
    assert gpt.device.type == "cuda" and n_bytes <= peak <= n_bytes + largest + (1 << 20)
