"""Quantised weights, keys and values: the same tokens in every kind of step; what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.errors import CheckpointError, DeviceError, OptionError, RoseError
from rosellm.models.attention import CausalAttention
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.loading import load_parts
from rosellm.models.model import Transformer
from rosellm.models.quantized import CODES, HEAD_FORM, WEIGHT_FORMS, QuantizedWeight, full, rounded_heads
from rosellm.models.weights import dummy_model, save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.wide_prefixes import widen
from tests.helpers import CPU, INTERPRETED, decode_all, greedy_sequences, random_prompts
from tests.roseinfer.ranks import tokens_of

PROMPTS = random_prompts([1, 70, 7, 33, 16], vocab_size=4096)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, seed=3, top_p=0.9)
MIXED = [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY]
SIZES = {"max_batch_size": 4, "num_kv_blocks": 32}
WAYS = [
    *({"rung": "paged"}, {"rung": "small_gemm"}, {"deterministic": True}),
    *({"speculation": "ngram"}, {"speculation": "draft", "prefix_cache": True}),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INT8_INTERPRETED = pytest.param(*INTERPRETED.values, "int8", marks=INTERPRETED.marks)
FP8_ON_GPU = pytest.param("cuda", "fp8", marks=pytest.mark.gpu)


def save_untied(model: str, folder: Path) -> None:
    """The shipped model with a head of its own: each token has the weights of another one's embedding."""
    tied, _ = load_parts(model, "cpu", "float32")
    untied = Transformer.allocate(replace(tied.whole, tie_embeddings=False), CPU, torch.float32)
    table = tied.token_embedding.weight.data
    for name, weight in untied.own_parameters.items():
        weight.copy_(table.roll(7, 0) if name == "lm_head.weight" else tied.own_parameters[name])
    save_model(untied, folder, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("model", ["rose-tiny", "rose-tiny-qwen3"])
def test_every_step_gives_the_tokens_of_the_dequantised_model(model, is_tied, form, device, tmp_path):
    given = {"model": model, "tokenizer": model}
    if not is_tied:
        save_untied(model, tmp_path)
        given |= {"model": str(tmp_path)}
    load = given | {"device": device, "dtype": "float32"}
    plain, tokenizer = load_parts(**load)
    rounded, _ = load_parts(**load, quantization=form)
    assert plain.config.tie_embeddings == is_tied
    weights = rounded.own_parameters
    assert isinstance(weights["token_embedding.weight"], QuantizedWeight) == is_tied
    assert isinstance(rounded.lm_head.weight, QuantizedWeight)
    for name, weight in plain.own_parameters.items():
        weight.data.copy_(full(weights[name]))
    expected = tokens_of(Engine(plain, tokenizer, recipe="dense", **SIZES), PROMPTS, MIXED)
    for way in [{}, *(WAYS if is_tied else WAYS[:-1])]:  # only shipped models have a draft model of their own
        llm = LLM(**load, quantization=form, warm_up=False, **SIZES, **way)
        assert tokens_of(llm.engine, PROMPTS, MIXED) == expected, way


def test_kernels_that_read_no_codes_of_4_bits_get_dequantised_weights():
    rounded, tokenizer = load_parts("rose-tiny", "cpu", "float32", quantization="int4")
    found = []
    for kernels in ("torch", "triton"):
        engine = Engine(rounded, tokenizer, kernels=kernels, recipe="small_gemm", warm_up=False, **SIZES)
        found.append(tokens_of(engine, [[5, 9]], [SamplingParams(temperature=0.0, max_tokens=2)]))
    assert found[0] == found[1]


@torch.inference_mode()
def tokens_with_rounded_heads(model: Transformer, prompt: list[int], n_tokens: int, form: str) -> list[int]:
    """Greedy tokens, by whole forward passes whose keys and values are rounded after their rotation."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        whole = CausalAttention([len(tokens)], model.device, model.config.scale, model.config.window)
        ids, positions = torch.tensor(tokens, device=model.device), torch.arange(len(tokens))

        def attend(layer, q, k, v, whole=whole):
            return whole(layer, q, rounded_heads(k, form), rounded_heads(v, form))

        hidden = model(ids, positions.to(model.device), attend)
        tokens.append(model.logits(hidden[-1:]).argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize("model", ["rose-tiny", "rose-tiny-qwen3"])
def test_every_step_attends_to_rounded_keys_and_values(model, form, device):
    """In chunks, with shared prefixes, after preemption, and in steps that verify drafts."""
    plain, _ = load_parts(model, device, "float32")
    prompts = [*PROMPTS, PROMPTS[1][:40] + PROMPTS[3]]
    expected = [tokens_with_rounded_heads(plain, prompt, 10, form) for prompt in prompts]
    ways = [{}, {"prefill_chunk": 16, "prefix_cache": True}, {"num_kv_blocks": 5, "block_size": 32}]
    ways += [{"speculation": "ngram"}, {"speculation": "draft", "prefix_cache": True}]
    for way in ways:
        options = {"device": device, "dtype": "float32", "warm_up": False} | SIZES | way
        llm = LLM(model, kv_cache_dtype=form, **options)
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in found] == expected, way


@pytest.mark.parametrize(("device", "form"), [INT8_INTERPRETED, FP8_ON_GPU])
def test_chunks_in_16_bits_attend_to_copies_of_long_prefixes_unless_they_are_too_many(
    device, form, monkeypatch
):
    n_copied = []

    def widen_and_count(*, blocks, **rest):
        n_copied.append(len(blocks))
        return widen(blocks=blocks, **rest)

    monkeypatch.setattr("rosellm.roseinfer.kernels.prefill.widen", widen_and_count)
    monkeypatch.setattr("rosellm.roseinfer.steps.captured_prefill.CAPTURED_TOKENS", 1)
    monkeypatch.setattr("rosellm.roseinfer.steps.packed_prefill.LONG_PREFIX", 48)
    monkeypatch.setattr("rosellm.roseinfer.steps.packed_prefill.MOST_TOKENS", 112)
    plain, tokenizer = load_parts("rose-tiny", device, "float16")
    options = {"recipe": "fused_append", "kernels": "triton", "block_size": 16, "warm_up": False}
    engine = Engine(plain, tokenizer, kv_cache_dtype=form, **SIZES | options)
    prompts = random_prompts([70, 90, 60], vocab_size=4096)
    sequences = greedy_sequences(engine, prompts, 3)
    for counts in ([20, 48, 10], [20, 10, 10], [10, 10, 20]):
        engine.begin_prefill(sequences, counts)
    assert n_copied == [2 + 3 + 1] * plain.config.n_layers  # then 40 + 58 + 20 tokens are in 3 + 4 + 2 blocks
    engine.begin_prefill(sequences)
    expected = [tokens_with_rounded_heads(plain, one, 3, form) for one in prompts]
    assert decode_all(engine, sequences) == expected


@pytest.mark.parametrize("form", CODES)
def test_quantised_keys_and_values_take_one_byte_and_a_scale_per_head(form, monkeypatch):
    sizes = {"kv_cache_dtype": form, "max_batch_size": 2, "num_kv_blocks": 3, "warm_up": False}
    engine = LLM("rose-tiny", device="cpu", **sizes).engine
    config, blocks = engine.config, engine.blocks
    heads = config.n_layers * 3 * engine.block_size * config.n_kv_heads
    assert blocks.k_cache.nbytes == blocks.v_cache.nbytes == heads * (config.head_dim + 4)
    monkeypatch.setattr("rosellm.roseinfer.trial.CPU_KV_BYTES", limit := 1_000_000)
    sizes = {"kv_cache_dtype": form, "max_batch_size": 64, "block_size": 16, "warm_up": False}
    engine = LLM("rose-tiny", device="cpu", **sizes).engine
    taken = engine.blocks.k_cache.nbytes + engine.blocks.v_cache.nbytes
    assert taken <= limit < taken + taken / engine.num_kv_blocks


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_a_model_of_every_family_is_quantised_as_it_is_made(form, monkeypatch):
    device, sizes = torch.device("cpu"), {"n_layers": 1, "vocab_size": 640, "n_positions": 64, "d_model": 256}
    sizes |= {"n_heads": 4, "n_kv_heads": 4, "head_dim": 64, "d_ff": 512}
    for arch in {arch.family: arch for arch in KNOWN_SHAPES.values()}.values():
        monkeypatch.setitem(KNOWN_SHAPES, "small", replace(arch, **sizes))
        plain = dummy_model("small", device, torch.bfloat16)
        model = dummy_model("small", device, torch.bfloat16, quantization=form)
        for part, shape in model.config.shapes.items():
            weight, whole = getattr(model.blocks[0], part).weight, getattr(plain.blocks[0], part).weight
            n_bytes = weight.codes.nbytes + weight.scales.nbytes
            assert weight.shape == shape and weight.form == form
            assert n_bytes == (whole.numel() * 0.515625 if form == "int4" else whole.numel() + 4 * len(whole))
            most = 0.21 if form == "int4" else 0.04
            assert (weight.dequantized() - whole.float()).abs().max() < most * whole.abs().max()
        head, whole = model.lm_head.weight, plain.lm_head.weight
        assert head.form == HEAD_FORM and head.nbytes == whole.numel() + 4 * len(whole)
        assert (head.dequantized() - whole.float()).abs().max() < 0.04 * whole.abs().max()
        table = model.token_embedding.weight
        assert table is head if arch.tie_embeddings else torch.equal(table, plain.token_embedding.weight)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantization": "int3"}, OptionError, "quantization 'int3' is unknown; use 'fp8', 'int8', 'int4'"),
        ({"quantization": 8}, OptionError, "quantization 8 is unknown"),
        ({"quantization": "int8", "rung": "one_pass"}, RoseError, "exhibits read weights of 16 or 32 bits"),
        ({"quantization": "int8", "tune": True}, OptionError, "tuning needs one Hopper GPU"),
        ({"quantization": "int8", "tensor_parallel_size": 2}, OptionError, "quantised on one GPU"),
        (
            {"kv_cache_dtype": "fp4"},
            OptionError,
            "kv_cache_dtype 'fp4' is unknown; use 'auto', 'fp8', 'int8'",
        ),
        ({"kv_cache_dtype": "fp8", "deterministic": True}, OptionError, "deterministic=True needs keys"),
        ({"kv_cache_dtype": "int8", "rung": "dense"}, RoseError, "keeps keys and values in the model"),
        ({"kv_cache_dtype": "int8", "rung": "one_pass"}, RoseError, "keeps keys and values in the model"),
    ],
)
def test_what_cannot_be_quantised_is_refused_in_one_line(options, error, words):
    with pytest.raises(error, match=words):
        LLM("rose-tiny", device="cpu", **options)


def test_sizes_that_do_not_fit_the_format_and_an_old_gpu_are_refused(monkeypatch):
    narrow = replace(KNOWN_SHAPES["gpt2"], d_ff=100, n_layers=1)
    monkeypatch.setitem(KNOWN_SHAPES, "narrow", narrow)
    with pytest.raises(OptionError, match="multiples of 16; 'up' of this model is 100 x 768"):
        load_parts("narrow", "cpu", load_format="dummy", quantization="int8")
    monkeypatch.setitem(KNOWN_SHAPES, "narrow", replace(narrow, d_ff=208))
    with pytest.raises(OptionError, match="needs inputs in groups of 128; 'down' of this model is 768 x 208"):
        load_parts("narrow", "cpu", load_format="dummy", quantization="int4")
    monkeypatch.setattr("rosellm.models.loading.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(DeviceError, match="'fp8' needs a GPU of compute capability 8.9"):
        load_parts("gpt2", load_format="dummy", quantization="fp8")


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_weights_are_refused_that_the_models_dtype_cannot_hold_and_tiny_ones_are_not(form, tmp_path):
    model, tokenizer = load_parts("rose-tiny", "cpu", "float32")
    model.blocks[0].out.weight.data[3] = 0
    model.blocks[0].out.weight.data[3, 0] = 1e-44
    save_model(model, tmp_path, torch.float32)
    small, _ = load_parts(str(tmp_path), "cpu", "float32", quantization=form, tokenizer="rose-tiny")
    assert small.blocks[0].out.weight.dequantized()[3].abs().max() < 1e-37
    with pytest.raises(OptionError, match="a quantised model cannot be moved or cast"):
        small.half()
    model.blocks[0].up.weight.data[0, 0] = 7e4
    save_model(model, tmp_path, torch.float32)
    with pytest.raises(CheckpointError, match="c_fc.weight holds values that are not finite in float16"):
        load_parts(str(tmp_path), "cpu", "float16", quantization=form, tokenizer="rose-tiny")
