"""What tests of families share: small random models of ``transformers``, and both sides' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.models.weights import load_model
from tests.helpers import CPU, random_prompts, uncached_logits

VOCABULARY = 131

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 5, "pad_token_id": None,
}  # fmt: skip
GPT2_SIZES = {
    "vocab_size": VOCABULARY, "n_embd": 48, "n_inner": 56, "n_layer": 2, "n_head": 6, "n_positions": 128,
    "bos_token_id": None, "eos_token_id": 5,
}  # fmt: skip


def sizes(family: str) -> dict[str, Any]:
    """A small odd shape, in the family's own fields."""
    return GPT2_SIZES if family == "gpt2" else SIZES


@torch.no_grad()
def their_model(family: str, seed: int = 0, **fields: Any) -> Any:
    """One of ``transformers``, fp32, whose every parameter is random: biases and norms too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(sizes(family) | fields))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.2)
    return model.eval()


def loaded(theirs: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """Our model of what ``transformers`` saves."""
    theirs.save_pretrained(folder)
    return load_model(str(folder), CPU, dtype)


def prompt(length: int) -> list[int]:
    return random_prompts([length], vocab_size=VOCABULARY)[0]


def our_logits(model: Transformer, tokens: list[int]) -> Tensor:
    """``[N, V]`` of all positions, in fp32."""
    return uncached_logits(model, tokens).float()


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def greedy(logits: Any, model: Any, tokens: list[int], n: int) -> list[int]:
    """``n`` tokens, each by ``logits`` of all before it, without a cache."""
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return tokens[-n:]


def check_equal(theirs: Any, ours: Transformer, length: int = 100) -> None:
    """Equal logits, of which some are large, and the same greedy choices."""
    tokens = prompt(length)
    expected, found = their_logits(theirs, tokens), our_logits(ours, tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def refused(kind: type[Exception], words: tuple[str, ...], call: Callable, *given: Any) -> None:
    """``call`` raises that very kind of error, in one short line that holds the words."""
    with pytest.raises(kind) as caught:
        call(*given)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message and all(word in message for word in words), message
    assert len(message) < 600 + sum(len(str(one)) for one in given if isinstance(one, Path)), message
