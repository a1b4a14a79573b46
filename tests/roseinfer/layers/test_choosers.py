"""The choice of tokens on the device: each row's by its own request."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.models.quantized import QuantizedRows, RowFormat
from rosellm.roseinfer.cache.device_state import DeviceState, row_bytes
from rosellm.roseinfer.cache.token_counts import WORD_COLUMNS, entries_of
from rosellm.roseinfer.kernels.advance import advance_ref
from rosellm.roseinfer.kernels.draw import draw, penalised_ref
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from rosellm.roseinfer.layers.choosers import Chooser, FusedChooser, LogitsChooser, build_chooser, full_logits
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import random_model, small_config
from tests.roseinfer.kernels.kernel_checks import HOPPER, assert_near, every_twin

WISHES = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3},
    "top_k": {"temperature": 0.8, "top_k": 7},
    "top_p": {"temperature": 1.1, "top_p": 0.6},
    "greedy with top_k": {"temperature": 0.0, "top_k": 3},
    "min_p": {"temperature": 1.2, "min_p": 0.3},
    "penalised": {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 1.0},
    "penalised top_p": {"top_p": 0.7, "frequency_penalty": 1.5},
}
PROMPT, OUTPUT = [1, 2, 3], [2, 4]
POSITION = 4
MODEL = random_model(0)
VOCAB = MODEL.config.vocab_size
COUNTED = len(WISHES), VOCAB + WORD_COLUMNS


def fused() -> FusedChooser:
    counts = torch.zeros(COUNTED, dtype=torch.int32)
    return FusedChooser(MODEL, TORCH, counts, full_logits(MODEL, TORCH))


def of_logits() -> LogitsChooser:
    return LogitsChooser(MODEL.logits, TORCH, torch.zeros(COUNTED, dtype=torch.int32))


def hidden_of(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, MODEL.config.d_model, generator=torch.Generator().manual_seed(seed))


def params_of(names: tuple[str, ...], seed: int) -> list[SamplingParams]:
    """Rows have seeds ``seed``, ``seed + 1`` …"""
    return [SamplingParams(max_tokens=9, seed=seed + i, **WISHES[name]) for i, name in enumerate(names)]


def choose(chooser: Chooser, hidden: Tensor, names: tuple[str, ...], seed: int) -> list[int]:
    """The token that each row takes."""
    rows = params_of(names, seed)
    state = DeviceState(len(rows), 2, torch.device("cpu"))
    for i, params in enumerate(rows):
        sequence = Sequence(i, PROMPT, params, ())
        sequence.tokens += OUTPUT
        chooser.counts[i] = 0
        for token, number in zip(*entries_of(sequence, POSITION), strict=True):
            chooser.counts[i, token] = int(number)
        counts = i + 1 if params.is_penalised else 0
        words = torch.frombuffer(bytearray(row_bytes(sequence, POSITION, 0, counts)), dtype=torch.int32)
        state.rows[i, : len(words)] = words
    values, indices = chooser(hidden, state, chooser.mode(rows))
    advance_ref(state=state, slots=torch.arange(len(rows)), values=values, indices=indices)
    return state.ring[0].tolist()


def specified(hidden: Tensor, names: tuple[str, ...], seed: int) -> list[int]:
    rows = params_of(names, seed)
    seen = torch.zeros(len(rows), VOCAB, dtype=torch.int32)
    seen[:, PROMPT] += 1
    seen[:, OUTPUT] += 2
    penalties = torch.tensor([[p.repetition, p.presence_penalty, p.frequency_penalty] for p in rows]).T
    rules = torch.tensor([[p.temperature, p.top_k, p.top_p, p.min_p] for p in rows]).T
    logits = penalised_ref(MODEL.logits(hidden), seen, *penalties)
    seeds, positions = torch.tensor([p.seed for p in rows]), torch.full((len(rows),), POSITION + 1)
    return draw(logits, *rules, seeds, positions).tolist()


@pytest.mark.parametrize(
    "names",
    [
        *((name,) for name in WISHES),
        tuple(WISHES),
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in product(WISHES, WISHES)),
    ],
    ids=" and ".join,
)
def test_a_rows_token_is_the_draw_that_its_own_wish_specifies_whatever_shares_the_batch(names):
    hidden = hidden_of(len(names), 8)
    for seed in range(20):
        for chooser in (fused(), of_logits()):
            assert choose(chooser, hidden, names, seed) == specified(hidden, names, seed)


def quantised_model(device: str, dtype: torch.dtype, vocab_size: int) -> Transformer:
    config = small_config(vocab_size=vocab_size, d_model=256, n_heads=4)
    return Transformer.allocate(config, torch.device(device), dtype, quantization="int8").initialise(0)


@every_twin
@torch.inference_mode()
def test_full_logits_of_a_quantised_head_are_the_models(kernels, device):
    model = quantised_model(device, torch.float32, 5001)
    hidden = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).to(device)
    assert_near(full_logits(model, kernels)(hidden), model.logits(hidden))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a ring, which Hopper GPUs have")
@pytest.mark.parametrize("rows", [1, 16, 100])
@torch.inference_mode()
def test_with_a_ring_logits_and_choice_are_of_codes_of_two_digits(rows):
    model = quantised_model("cuda", torch.bfloat16, 50257)
    hidden = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    digits = QuantizedRows.of(hidden, RowFormat("int8", 2)).dequantized()
    expected = digits @ model.lm_head.weight.dequantized().t()
    chooser = build_chooser("fused", model, TRITON, torch.zeros(1, 1, dtype=torch.int32, device="cuda"))
    assert_near(chooser.logits(hidden), expected, 5e-5)
    values, indices = chooser(hidden, DeviceState(rows, 3, torch.device("cuda")), "greedy")
    best, tile = values.max(dim=1, keepdim=True)
    assert_near(best, expected.amax(dim=1, keepdim=True), 5e-5)
    chosen = expected.gather(1, indices.gather(1, tile).long())
    assert_near(chosen, expected.amax(dim=1, keepdim=True), 5e-5)
