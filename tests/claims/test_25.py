"""Notebook 25: the contexts that the checker tries."""

from rosellm.lab.trying.case import LONG, LONGEST
from tests.claims.prose import prose, said
from tests.claims.reading import number


def test_the_checkers_long_contexts_are_those_named():
    told = said(prose("25"), r"also tries contexts of (\d+) and ([\d,]+) tokens")
    assert [number(one) for one in told] == [LONG.cached, LONGEST.cached]
