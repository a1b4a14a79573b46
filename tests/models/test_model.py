"""The model against ``transformers``, and what its interface promises."""

from __future__ import annotations

import pytest
import torch

from rosellm.models.attention import CausalAttention
from rosellm.models.model import Transformer
from rosellm.models.weights import save_model
from tests.helpers import CPU, FAMILIES, random_model, random_prompts, small_config, uncached_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_logits_equal_those_of_transformers(tmp_path, tie, device):
    from transformers import GPT2LMHeadModel

    gpt = random_model(0, small_config(tie_embeddings=tie, n_heads=4, d_ff=48))
    save_model(gpt, tmp_path, torch.float32)
    theirs = GPT2LMHeadModel.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for prompt in random_prompts([1, 5, 64]):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        found = uncached_logits(gpt.to(device), prompt).cpu()
        assert expected.abs().max() > 1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 7, 3], [5]], ids=str)
def test_packed_sequences_do_not_see_each_other(lengths):
    gpt, prompts = random_model(0), random_prompts(lengths)
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.inference_mode():
        together = gpt.logits(gpt(ids, positions, CausalAttention(lengths, CPU)))
    alone = torch.cat([uncached_logits(gpt, prompt) for prompt in prompts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def initialised(seed: int, **options) -> Transformer:
    return Transformer.allocate(small_config(d_model=128), CPU, torch.float32).initialise(seed, **options)


def test_initialisation_follows_its_seed():
    a, b, c = (initialised(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["token_embedding.weight"], c["token_embedding.weight"])


def test_initialisation_has_gpt2s_deviations():
    gpt = initialised(0, std=0.1)
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
