"""The model's weights and gradients; ``test_families`` compares its logits with ``transformers``."""

from __future__ import annotations

import pytest
import torch

from rosellm.models.attention import CausalAttention
from rosellm.models.model import Transformer
from tests.helpers import CPU, FAMILIES, random_model, small_config


def test_initialisation_has_gpt2s_deviations():
    gpt = Transformer.allocate(small_config(d_model=128), CPU, torch.float32).initialise(0, std=0.1)
    for name, parameter in gpt.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0]
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.1 / (2 if residual else 1), rel=0.05)


def test_gradients_reach_every_parameter():
    gpt = Transformer(small_config()).initialise(0)
    ids = torch.arange(16) % 5
    hidden = gpt(ids, torch.arange(16), CausalAttention([16], CPU))
    torch.nn.functional.cross_entropy(gpt.logits(hidden), ids).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in gpt.parameters())


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cast_keeps_the_heads_rows_of_zeros_its_ties_and_angles_in_fp32(dtype, family):
    gpt = random_model(0, small_config(**FAMILIES.get(family, {})))
    angles, weight = gpt.cos_sin, gpt.lm_head.weight.clone()
    cast = gpt.to(dtype)
    rows = len(weight)
    assert torch.equal(cast.padded_head[:rows], weight.to(dtype)) and not cast.padded_head[rows:].any()
    tied = cast.lm_head.weight is cast.token_embedding.weight
    assert tied == gpt.config.tie_embeddings
    assert angles is cast.cos_sin or torch.equal(angles, cast.cos_sin)
