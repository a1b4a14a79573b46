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
from rosellm.models.quantized import CODES, GROUP, LARGEST

CONFIG = LlamaConfig(
    vocab_size=640, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
WAYS = {  # format, bits, strategy, whether activations are quantised as well
    "fp8": ("float-quantized", 8, "channel", False),
    "fp8, one scale": ("float-quantized", 8, "tensor", True),
    "int8": ("int-quantized", 8, "channel", True),
    "int8, packed": ("pack-quantized", 8, "channel", False),
    "int4": ("pack-quantized", 4, "group", False),
}


@pytest.fixture(params=WAYS)
def way(request) -> str:
    return request.param


@pytest.fixture
def folder(way, tmp_path):
    """A checkpoint as compressed-tensors stores it."""
    form, bits, strategy, with_activations = WAYS[way]
    kind = "float" if form == "float-quantized" else "int"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path)
    dtype = CODES["fp8" if kind == "float" else "int8"]
    low, high = (-8, 7) if bits == 4 else (-LARGEST[dtype], LARGEST[dtype])
    tensors = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = weight
            continue
        groups = weight.float().unflatten(1, (-1, GROUP if strategy == "group" else weight.shape[1]))
        largest = groups.abs().amax(2)
        scale = (largest.max()[None] if strategy == "tensor" else largest) / ((high - low) / 2)
        scale = scale.to(torch.bfloat16)
        codes = (groups / scale.float()[..., None]).flatten(1).clamp(low, high)
        codes = (codes.round() if kind == "int" else codes).to(dtype)
        tensors |= {f"{name}_scale": scale, name: codes}
        if form == "pack-quantized":
            tensors[f"{name}_packed"] = pack_to_int32(tensors.pop(name), bits)
            tensors[f"{name}_shape"] = torch.tensor(codes.shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    args = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "strategy": strategy}
    if strategy == "group":
        args |= {"group_size": GROUP, "actorder": "weight"}
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
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)


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

    assert refusal(folder, quantization="int8") == "quantization is 'int8'; the checkpoint has 'fp8' weights"
    for changed in (
        config | {"quant_method": "gptq"},
        config | {"ignore": []},
        config | {"format": "nvfp4-pack-quantized"},
        config | {"config_groups": {"a": group | {"targets": ["re:.*q_proj"]}}},
        config | {"config_groups": {"a": group | {"weights": group["weights"] | {"num_bits": 4}}}},
        config | {"config_groups": {"a": group, "b": group}},
    ):
        edit(folder, quantization_config=changed)
        assert "not supported; compressed-tensors with symmetric weights" in refusal(folder)
    edit(folder, quantization_config=config | {"config_groups": 3})
    assert "quantization_config is not supported: config_groups Input should be a valid" in refusal(folder)
    edit(folder, quantization_config=config | {"format": "int-quantized", "config_groups": {
        "a": {"targets": ["Linear"], "weights": group["weights"] | {"type": "int"}}}})  # fmt: skip
    assert "q_proj.weight is stored as float8_e4m3fn; quantization_config says int8" in refusal(folder)
    edit(folder, quantization_config=config)
    scale = "model.layers.1.mlp.up_proj.weight_scale"
    tensors = load_file(folder / "model.safetensors")
    for wrong, words in (
        (
            {scale: tensors[scale] * float("inf")},
            "up_proj.weight holds values that are not finite in float32",
        ),
        ({scale: -tensors[scale]}, "scales that are not above 0"),
        ({scale: tensors[scale][:5].contiguous()}, "with 5 scales"),
        ({scale: None}, "lacks 1 tensors, the first is model.layers.1.mlp.up_proj.weight"),
    ):
        assert words in refusal_of(wrong, tensors, folder)


@pytest.mark.parametrize("way", ["int4"], indirect=False)
def test_weights_of_4_bits_in_other_groups_or_orders_are_refused_in_one_line(folder, way):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    args = config["config_groups"]["group_0"]["weights"]
    for changed in (
        *({"group_size": 64}, {"strategy": "channel", "group_size": None}, {"symmetric": False}),
        *({"actorder": "group"}, {"num_bits": 8}, {"type": "float"}, {"num_bits": 3}),
    ):
        group = {"targets": ["Linear"], "weights": args | changed}
        edit(folder, quantization_config=config | {"config_groups": {"a": group}})
        assert refusal(folder).endswith("4 bits and one per 128 inputs, not reordered, is"), changed
    edit(folder, quantization_config=config)
    assert "calibration needs" in refusal(folder, quantization="int4", calibration="text")
    name = "model.layers.1.mlp.down_proj.weight"
    packed, scale, zeros = f"{name}_packed", f"{name}_scale", f"{name}_zero_point"
    tensors = load_file(folder / "model.safetensors")
    order = torch.arange(384, dtype=torch.int32)
    for wrong, words in (
        ({scale: tensors[scale] * float("nan")}, "scales that are not above 0"),
        (
            {scale: tensors[scale] * float("inf")},
            "down_proj.weight holds values that are not finite in float32",
        ),
        ({scale: tensors[scale] * 0}, "scales that are not above 0"),
        ({scale: tensors[scale].t().contiguous()}, "has shape [256, 384] with 768 scales"),
        ({scale: tensors[scale][:, :1].contiguous()}, "has shape [256, 384] with 256 scales"),
        ({packed: pack_to_int32(torch.zeros(256, 384, dtype=torch.int8), 8)}, "has shape [256, 768]"),
        ({packed: tensors[packed].flatten()}, "has shape [12288]"),
        ({packed: tensors[packed].long()}, "is stored as int64; quantization_config says int4"),
        ({packed: None, name: torch.zeros(256, 384, dtype=torch.int8)}, "is stored as int8"),
        ({f"{name}_g_idx": order}, "has zero points or reordered inputs"),
        ({zeros: torch.ones(256, 3, dtype=torch.int8)}, "has zero points or reordered inputs"),
    ):
        assert words in refusal_of(wrong, tensors, folder)
    save_file(tensors | {zeros: torch.zeros(256, 3, dtype=torch.int8)}, folder / "model.safetensors")
    load_parts(str(folder), "cpu", tokenizer="rose-tiny")


def refusal(folder, **options) -> str:
    with pytest.raises(RoseError) as caught:
        load_parts(str(folder), "cpu", tokenizer="rose-tiny", **options)
    return str(caught.value)


def refusal_of(wrong, tensors, folder) -> str:
    """The refusal of a checkpoint with other tensors; without those that are None."""
    left = {name: tensor for name, tensor in (tensors | wrong).items() if tensor is not None}
    save_file(left, folder / "model.safetensors")
    return refusal(folder)
