"""What an error message tells of a value: one line, bounded, whatever the value is."""

from __future__ import annotations

import pytest
import torch

from rosellm.errors import LONGEST_TOLD, LONGEST_TOLD_ERROR, describe


class Broken(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


LARGE = [
    "a" * 10**6,
    list(range(10**6)),
    [["a" * 1000] * 1000] * 1000,
    torch.eye(900),
    Broken(),
    [Broken()] * 99,
]


@pytest.mark.parametrize("value", LARGE, ids=range(len(LARGE)))
def test_however_large_a_value_is_its_text_is_one_short_line(value: object) -> None:
    text = describe(value)
    assert 0 < len(text) <= LONGEST_TOLD and len(text.splitlines()) == 1


def test_an_error_is_told_by_its_first_line_even_if_it_has_no_message() -> None:
    assert "Broken" in describe(Broken()) and len(describe(Broken()).splitlines()) == 1
    assert len(describe(ValueError("a" * 10**6))) <= LONGEST_TOLD_ERROR
