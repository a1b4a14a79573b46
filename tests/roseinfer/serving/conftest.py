"""Engines of a small random model, and what tests of schedulers and streams share."""

from __future__ import annotations

import pytest

from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model, small_config, small_engine
from tests.roseinfer.serving.common import WORDS


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([WORDS], 290)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    config = small_config(vocab_size=tokenizer.vocab_size, n_positions=1100)
    return small_engine(random_model(3, config), tokenizer=tokenizer, recipe="resident_step")
