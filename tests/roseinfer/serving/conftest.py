"""Engines of a small random model, and what tests of schedulers and streams share."""

from __future__ import annotations

import pytest

from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.roseinfer.serving.common import WORDS, engine_of


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([WORDS], 290)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return engine_of(3, tokenizer, n_positions=1100)
