"""What an error message tells of a value: one line, bounded, whatever the value is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rosellm.errors import LONGEST_TOLD, LONGEST_TOLD_ERROR, describe


class Broken(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


TOLD = [
    ("\n\ud800", "'\\n\\ud800'"),
    ([1, "a", None], "[1, 'a', None]"),
    ({"a": (10**5000,)}, "{'a': (an integer of 16610 bits,)}"),
    (np.int64(1), "np.int64(1)"),
    (np.eye(2), "array([[1., 0.], [0., 1.]])"),
    ([torch.eye(2)], "[tensor([[1., 0.], [0., 1.]])]"),
    (ValueError("first\nsecond"), "ValueError: first"),
]
LARGE = [
    "a" * 10**6,
    list(range(10**6)),
    [["a" * 1000] * 1000] * 1000,
    torch.eye(900),
    Broken(),
    [Broken()] * 99,
]


@pytest.mark.parametrize(("value", "expected"), TOLD, ids=[expected for _value, expected in TOLD])
def test_a_value_is_told_as_python_writes_it_in_one_line(value: object, expected: str) -> None:
    assert describe(value) == expected


@pytest.mark.parametrize("value", LARGE, ids=range(len(LARGE)))
def test_however_large_a_value_is_its_text_is_one_short_line(value: object) -> None:
    text = describe(value)
    assert 0 < len(text) <= LONGEST_TOLD and len(text.splitlines()) == 1


def test_a_long_text_is_told_by_its_beginning_and_its_end() -> None:
    text = describe("a" * 300 + "z")
    assert text.startswith("'aaa") and "..." in text and text.endswith("az'")


def test_an_error_is_told_by_its_first_line_even_if_it_has_no_message() -> None:
    assert "Broken" in describe(Broken()) and len(describe(Broken()).splitlines()) == 1
    assert len(describe(ValueError("a" * 10**6))) <= LONGEST_TOLD_ERROR
