"""The tables of tile shapes: the first rule that holds decides, and one always does."""

from __future__ import annotations

import json

import pytest

from rosellm.roseinfer.kernels.tile_tables import TABLES, best

ALL = json.loads(TABLES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ALL)
def test_a_table_has_a_value_for_each_column_and_a_last_rule_for_all_sizes(name):
    columns, rules = ALL[name]["columns"], ALL[name]["rules"]
    assert all(len(values) == len(columns) for _, values in rules)
    assert rules[-1][0] == {} and all(conditions for conditions, _ in rules[:-1])


def test_conditions_compare_sizes_and_pairs_of_them_and_the_first_rule_that_holds_decides():
    sizes = {"rows": 1, "k": 1024, "bits": 16}
    assert best("few_rows", n=6144, **sizes) == (16, 1, 256, 2, 4, 1)
    assert best("few_rows", n=6143, **sizes) == (16, 1, 256, 4, 4, 1)
    ratio = {"rows": 1, "bits": 16, "k": 2048}
    assert best("few_rows", n=8193, **ratio)[3] == 2 != best("few_rows", n=8192, **ratio)[3] + 1
    assert [best("prefill", bits=16, head_dim=64, group=group)[3] for group in (1, 2, 3, 4)] == [1, 2, 1, 2]
