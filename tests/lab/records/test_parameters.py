"""What a notebook's parameters may be."""

import pytest

from rosellm.lab.records.bench import get_model
from rosellm.lab.records.parameters import ParameterError, check_parameters, model_path
from tests.helpers import random_model

Transformer = random_model(0)  # 64 positions
GOOD = {"batch": 1, "prompt_lengths": [1, 55], "new_tokens": 9, "seed": 0, "latency_us": 0.7}


def test_good_parameters_pass():
    check_parameters(Transformer, **GOOD)
    check_parameters(Transformer, batch=8, new_tokens=60)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch": 0}, "batch is 0; give a whole number, 1 or more"),
        ({"batch": 2.5}, "batch is 2.5; give a whole number"),
        ({"batch": True}, "batch is True; give a whole number"),
        ({"new_tokens": "9"}, "new_tokens is '9'; give a whole number"),
        ({"prompt_lengths": [2, 0]}, "prompt_lengths is 0; give a whole number"),
        ({"prompt_lengths": []}, "prompt_lengths is an empty list"),
        ({"seed": -1}, "seed is -1; give a whole number, 0 or more"),
        ({"latency_us": 0}, "latency_us is 0; give a number above 0"),
        ({"prompt_lengths": [2, 56]}, "a prompt of 56 tokens and 9 new ones exceed the model's 64 positions"),
        ({"prompt_tokens": 60}, "a prompt of 60 tokens and 9 new ones exceed the model's 64 positions"),
        ({"new_tokens": 64}, "a prompt of 55 tokens and 64 new ones exceed"),
    ],
    ids=str,
)
def test_a_bad_parameter_is_told_in_one_line_also_by_a_notebook(given, words):
    with pytest.raises(ParameterError, match=words) as caught:
        check_parameters(Transformer, **GOOD | given)
    (shown,) = caught.value._render_traceback_()
    assert words in shown and "\n" not in shown


def test_a_relative_folder_is_found_from_where_the_caller_stands(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("PWD", str(tmp_path))
    assert model_path("mine") == str(tmp_path / "mine")
    assert model_path("rose-tiny") == "rose-tiny"
    with pytest.raises(ValueError, match=str(tmp_path / "mine")):
        get_model("mine", "cpu")
