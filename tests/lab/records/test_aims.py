"""Aims: which way a figure keeps them, and which records they are of."""

from __future__ import annotations

import pytest

from rosellm.lab.records.aims import Verdict, aims_of


@pytest.mark.parametrize("unit", ["s", "ms", "µs", "%"])
def test_a_time_is_at_most_its_aim_and_a_share_at_least(unit) -> None:
    less, same, more = (Verdict("one", 5.0, found, unit).is_kept for found in (4.9, 5.0, 5.1))
    assert same and (less, more) == ((False, True) if unit == "%" else (True, False))


def test_aims_are_of_gpt2_at_full_size_alone() -> None:
    assert aims_of({"a": 1.0}, "gpt2", "full") == {"a": 1.0}
    assert aims_of({"a": 1.0}, "gpt2", "small") == aims_of({"a": 1.0}, "Qwen/Qwen3-0.6B", "full") == {}
