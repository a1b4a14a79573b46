"""Two GPUs against one: NCCL, or memory that they share, within the captured steps.

The engines of all cases are in one process, one after another, and those of rank 1 in a new one each.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.roseinfer.recipe import LADDER, Recipe, best_rung
from tests.helpers import random_prompts
from tests.roseinfer.ranks import assert_ends, have_ended, logits_of, other_ranks, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(60, method="thread"),  # a signal would not reach who waits for a GPU
]
PROMPTS = random_prompts([1, 40, 7, 200, 16, 90], vocab_size=4096)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=3)
FILTERED, PENALISED = replace(DRAWN, top_k=40, top_p=0.9), replace(DRAWN, repetition_penalty=1.2)
MIXED = [GREEDY, DRAWN, FILTERED, PENALISED, GREEDY, DRAWN]


def llm(model: str, n_ranks: int, **options) -> LLM:
    small = {"device": "cuda", "max_batch_size": 8, "num_kv_blocks": 64, "warm_up": False}
    return LLM(model, tensor_parallel_size=n_ranks, **(small | options))


def best(all_reduce: str) -> Recipe:
    return replace(LADDER[best_rung(torch.device("cuda"))], all_reduce=all_reduce)


@pytest.mark.parametrize(
    ("model", "all_reduce"),
    [("rose-tiny", "library"), ("rose-tiny", "one_shot"), ("rose-tiny-qwen3", "one_shot")],
)
def test_two_gpus_give_the_tokens_of_one_in_fp32(model, all_reduce):
    one, two = (llm(model, n, dtype="float32", recipe=best(all_reduce)).engine for n in (1, 2))
    assert tokens_of(one, PROMPTS, MIXED) == tokens_of(two, PROMPTS, MIXED)


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_logits_of_two_gpus_in_bf16_are_those_of_one(model):
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512}
    one = logits_of(llm(model, 1, **options).engine, PROMPTS, GREEDY, 3)
    with pytest.warns(UserWarning, match="one GPU probably decodes faster"):
        two = logits_of(llm(model, 2, **options).engine, PROMPTS, GREEDY, 3)
    assert (one - two).abs().max() < 0.1 * one.std()  # logits of 2 to 4 are 1/64 apart in bf16


@pytest.mark.parametrize(
    ("how", "all_reduce"),
    [(signal.SIGKILL, "one_shot"), (signal.SIGSTOP, "one_shot"), (signal.SIGKILL, "library")],
)
def test_a_gpu_whose_rank_dies_or_hangs_ends_the_engine(how, all_reduce):
    two = llm("rose-tiny", 2, recipe=best(all_reduce))
    two.generate(PROMPTS, GREEDY, use_tqdm=False)
    pids = other_ranks()
    assert_ends(two, PROMPTS, pids[-1], how, 0.3, "rank 1 of 2")
    assert have_ended(pids[-1:])
    torch.cuda.synchronize()
