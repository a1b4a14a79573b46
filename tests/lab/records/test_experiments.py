"""What the recorded experiments are given: operands of the model's own shape."""

from __future__ import annotations

from rosellm.lab.records.experiments import attention_operands
from tests.helpers import random_model, small_config


def test_attention_is_measured_with_the_models_own_scale():
    model = random_model(0, small_config(scale=0.7))
    assert attention_operands(model, batch=1, context=3)["scale"] == 0.7
