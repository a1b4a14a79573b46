"""Measure Llama-3.2-1B at batch size 1 as the published megakernel was: microseconds per token.

Each of 8 prompts of 32 random token ids generates 128 tokens greedily in its own ``LLM.generate`` call; the
prompts alternate. ``call_us`` is the duration of the call divided by 128 tokens; ``decode_us`` is the time
from the first to the last token divided by the 127 decode steps between them, like the published figures.

Source of the published figures: github.com/msaroufim/megakernels-vs-cuda-graphs
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from rosellm.bench.job import check_served
from rosellm.bench.record import across_repeats, engine_facts, tokens_sha256
from rosellm.lab.records.bench import make_prompts
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.parameters import model_path
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.sampling import SamplingParams

NAME = "llama_1b_protocol"
MODEL = "meta-llama/Llama-3.2-1B"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 128


def measure(llm: LLM, repeats: int) -> dict[str, Any]:
    """Generate from all prompts ``repeats`` times after a warm-up; return each call's figures and medians."""
    prompts = make_prompts(PROMPTS, PROMPT_TOKENS, llm.engine.config.vocab_size)
    list(_calls(llm, prompts))
    return across_repeats([call for _ in range(repeats) for call in _calls(llm, prompts)])


def _calls(llm: LLM, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for prompt in prompts:
        start = perf_counter()
        outputs = llm.generate(prompt, params, use_tqdm=False)
        seconds = perf_counter() - start
        check_served(outputs, params)
        (output,) = outputs
        tpot = output.metrics.tpot
        assert tpot is not None  # several tokens were generated
        yield {
            "call_us": seconds / len(output.token_ids) * 1e6,
            "decode_us": tpot * 1e6,
            "tokens_sha256": tokens_sha256([output.token_ids]),
        }


def record(asked: Asked) -> Iterator[Record]:
    """Measure, yield the record, and print the medians."""
    llm = LLM(model_path(asked.model), device=asked.device, load_format=asked.load_format)
    figures = measure(llm, asked["repeats"]) | {"engine": engine_facts(llm.engine)}
    sizes = {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    yield asked.record(NAME, model=asked.model, load_format=asked.load_format, **sizes, figures=figures)
    decode, call = (figures["medians"][name] for name in ("decode_us", "call_us"))
    print(f"{decode:.1f} µs per decode step, {call:.1f} µs per token of a whole call")


EXPERIMENTS = [Experiment(NAME, record, {"repeats": 10}, MODEL)]
