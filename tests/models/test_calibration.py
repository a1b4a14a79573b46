"""Weights of 4 bits chosen for a text: the codes of GPTQ, and models closer to the original."""

from __future__ import annotations

import pytest
import torch

from rosellm import LLM
from rosellm.bench.formats import log_probabilities
from rosellm.errors import OptionError
from rosellm.models.calibration import DAMPING, calibrate, calibrated
from rosellm.models.loading import load_parts
from rosellm.models.quantized import empty_weight
from rosellm.rosetrainer.corpus import read_corpus
from rosellm.rosetrainer.training import token_stream

CPU = torch.device("cpu")


def test_codes_are_those_of_gptq_with_the_inputs_of_largest_squares_first():
    torch.manual_seed(0)
    weight = torch.randn(24, 384)
    x = torch.randn(1000, 384) @ torch.randn(384, 384) * torch.logspace(-1, 1, 384)
    held = empty_weight(24, 384, "int4", CPU, torch.bfloat16)
    calibrate(held, weight, x.t() @ x)
    squares = (x.t() @ x).double()
    squares += DAMPING * squares.diag().mean() * torch.eye(384)
    inverse, left, found = squares.inverse(), weight.double(), torch.zeros(24, 384).double()
    scales = held.scales.t().repeat_interleave(128, 1).double()
    for i in squares.diag().argsort(descending=True).tolist():
        found[:, i] = (left[:, i] / scales[:, i]).round().clamp(-8, 7) * scales[:, i]
        left = left - torch.outer((left[:, i] - found[:, i]) / inverse[i, i], inverse[i])
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    assert (found.float() == held.dequantized()).float().mean() > 0.999


def test_codes_for_inputs_of_0_are_the_nearest():
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    held = empty_weight(16, 256, "int4", CPU, torch.bfloat16)
    calibrate(held, weight, torch.zeros(256, 256))
    assert ((held.dequantized() - weight).abs() < 0.3).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["rose-tiny", "rose-tiny-qwen3"])
def test_a_calibrated_model_is_closer_to_the_original_on_other_text(name, device):
    corpus = read_corpus()
    texts = [source.text[:9000] for source in corpus.train[7 :: len(corpus.train) // 12]]
    plain, tokenizer = load_parts(name, device, "float32")
    rounded, _ = load_parts(name, device, "float32", quantization="int4")
    sizes = {"max_batch_size": 1, "num_kv_blocks": 4, "warm_up": False}
    options = {"device": device, "dtype": "float32", "quantization": "int4"} | sizes
    llm = LLM(name, calibration=texts, **options)
    stream = token_stream(corpus.validation, tokenizer, plain.device)
    distances = {"without": 0.0, "with": 0.0}
    with torch.inference_mode():
        for window in stream[: 8 * 256].split(256):
            wanted = log_probabilities(plain, window)
            for key, model in ("without", rounded), ("with", llm.engine.model):
                distances[key] += (wanted.exp() * (wanted - log_probabilities(model, window))).sum().item()
    assert distances["with"] < 0.9 * distances["without"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int4", "calibration": 3}, "calibration is 3; give a text or a list of texts"),
        ({"quantization": "int4", "calibration": ["", b"x"]}, "give a text or a list of texts"),
        ({"quantization": "int4", "calibration": ["", ""]}, "calibration has no text"),
        ({"quantization": "int8", "calibration": "text"}, "calibration needs quantization='int4'"),
        ({"calibration": "text"}, "calibration needs quantization='int4'"),
        ({"quantization": "int4", "calibration": "text", "load_format": "dummy"}, "calibration needs"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(options, words):
    with pytest.raises(OptionError, match=words):
        LLM("rose-tiny", device="cpu", **options)


def test_texts_that_the_model_cannot_run_are_refused_in_one_line():
    plain, _ = load_parts("rose-tiny", "cpu", "float32")
    with pytest.raises(OptionError, match="calibration has token 4096; the model has 4,096 tokens"):
        calibrated(plain, [torch.tensor([1, 4096])], CPU)
    plain.blocks[0].norm_2.weight[0] = torch.inf
    with pytest.raises(OptionError, match="activations that are not finite in torch.float32"):
        calibrated(plain, [torch.tensor([1, 2])], CPU)
