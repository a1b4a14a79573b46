"""The models that come with the package: small, and able to write."""

from __future__ import annotations

from functools import cache

import pytest

from rosellm import LLM, SamplingParams
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder

MOST_BYTES = 12_000_000
PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n\n\nclass Cache:\n    def __init__(self",
    "    for i in",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def generated(model: str, rung: str | None, **options: object) -> list[str]:
    llm = LLM(model, device="cpu", rung=rung, max_batch_size=4, **options)
    return [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@cache
def expected(model: str) -> list[str]:
    return generated(model, "dense")


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_a_shipped_model_fits_twelve_megabytes(model: str) -> None:
    files = [path for path in checkpoint_folder(model).rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.parametrize("model", SHIPPED_MODELS)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_a_shipped_model_generates_the_same_text_on_the_first_and_the_best_rung(model: str, options) -> None:
    assert generated(model, None, **options) == expected(model)


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_a_shipped_model_writes_python(model: str) -> None:
    text = "".join(expected(model))
    assert all(len(own) > 10 for own in expected(model)) and "self" in text and "\n" in text
