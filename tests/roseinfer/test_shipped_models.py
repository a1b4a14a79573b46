"""The models that come with the package: small, and able to write."""

from __future__ import annotations

import pytest

from rosellm import LLM, SamplingParams
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder

PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n\n\nclass Cache:\n    def __init__(self",
    "    for i in",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_a_shipped_model_fits_twelve_megabytes(model):
    files = [path for path in checkpoint_folder(model).rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 12_000_000


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_a_shipped_model_writes_python(model):
    texts = [result.outputs[0].text for result in LLM(model, device="cpu").generate(PROMPTS, GREEDY)]
    assert all(len(text) > 10 for text in texts)
    assert "self" in "".join(texts) and "\n" in "".join(texts)
