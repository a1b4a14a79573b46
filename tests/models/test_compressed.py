"""Checkpoints of compressed-tensors: the weights that transformers reads from them, and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rosellm import LLM, SamplingParams
from rosellm.errors import RoseError
from rosellm.models.loading import load_parts
from rosellm.models.quantized import CODES, LARGEST

CONFIG = LlamaConfig(
    vocab_size=640, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
WAYS = {  # format, type, strategy, whether activations are quantised as well
    "fp8": ("float-quantized", "float", "channel", False),
    "fp8, one scale": ("float-quantized", "float", "tensor", True),
    "int8": ("int-quantized", "int", "channel", True),
    "int8, packed": ("pack-quantized", "int", "channel", False),
}


@pytest.fixture(params=WAYS)
def way(request) -> str:
    return request.param


@pytest.fixture
def folder(way, tmp_path):
    """A checkpoint as compressed-tensors stores it."""
    form, kind, strategy, with_activations = WAYS[way]
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path)
    dtype = CODES["fp8" if kind == "float" else "int8"]
    tensors = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        largest = weight.float().abs().amax(1, keepdim=True)
        scale = (largest if strategy == "channel" else largest.max()[None]) / LARGEST[dtype]
        scale = scale.to(torch.bfloat16)
        codes = (weight.float() / scale.float()).clamp(-LARGEST[dtype], LARGEST[dtype])
        codes = (codes.round() if kind == "int" else codes).to(dtype)
        tensors |= {f"{name}_scale": scale, name: codes}
        if form == "pack-quantized":
            tensors[f"{name}_packed"] = pack_to_int32(tensors.pop(name), 8)
            tensors[f"{name}_shape"] = torch.tensor(codes.shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    args = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": args}
    if with_activations:
        group["input_activations"] = args | {"dynamic": True, "strategy": "token"}
    fields = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    edit(tmp_path, quantization_config=fields | {"ignore": ["lm_head"], "config_groups": {"group_0": group}})
    return tmp_path


def edit(folder, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_weights_are_those_of_transformers(folder, way):
    ours, _ = load_parts(str(folder), "cpu", "float32", tokenizer="rose-tiny")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs(torch.arange(9)[None])  # dequantises
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        joined = {"qkv": qkv, "out": [attention.o_proj.weight], "down": [mlp.down_proj.weight]}
        joined["up"] = [mlp.gate_proj.weight, mlp.up_proj.weight]
        for name, weights in joined.items():
            found = getattr(block, name).weight.dequantized()
            torch.testing.assert_close(found, torch.cat(weights).float(), rtol=1e-6, atol=0)
    assert ours.quantization == way[:4].strip(",")


def test_such_a_checkpoint_is_served_with_no_option(folder):
    llm = LLM(str(folder), device="cpu", tokenizer="rose-tiny", max_batch_size=2)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("way", ["fp8"], indirect=False)
def test_what_cannot_be_read_is_refused_in_one_line(folder, way):
    path = folder / "config.json"
    config = json.loads(path.read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]

    def refusal(**options) -> str:
        with pytest.raises(RoseError) as caught:
            load_parts(str(folder), "cpu", tokenizer="rose-tiny", **options)
        return str(caught.value)

    assert refusal(quantization="int8") == "quantization is 'int8'; the checkpoint has 'fp8' weights"
    for changed in (
        config | {"quant_method": "gptq"},
        config | {"ignore": []},
        config | {"format": "nvfp4-pack-quantized"},
        config | {"config_groups": {"a": group | {"targets": ["re:.*q_proj"]}}},
        config | {"config_groups": {"a": group | {"weights": group["weights"] | {"num_bits": 4}}}},
        config | {"config_groups": {"a": group, "b": group}},
    ):
        edit(folder, quantization_config=changed)
        assert "not supported; compressed-tensors with 8-bit weights" in refusal()
    edit(folder, quantization_config=config | {"config_groups": 3})
    assert "quantization_config cannot be read" in refusal()
    edit(folder, quantization_config=config | {"format": "int-quantized", "config_groups": {
        "a": {"targets": ["Linear"], "weights": group["weights"] | {"type": "int"}}}})  # fmt: skip
    assert "q_proj.weight is stored as float8_e4m3fn; quantization_config says int8" in refusal()
    edit(folder, quantization_config=config)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    for wrong, words in (
        (tensors[name] * float("inf"), "up_proj.weight holds values that are not finite in float32"),
        (-tensors[name], "scales that are not above 0"),
        (tensors[name][:5], "with 5 scales"),
        (None, "lacks 1 tensors, the first is model.layers.1.mlp.up_proj.weight"),
    ):
        changed = {key: value for key, value in tensors.items() if key != name}
        changed |= {} if wrong is None else {name: wrong.contiguous()}
        save_file(changed, folder / "model.safetensors")
        assert words in refusal()
