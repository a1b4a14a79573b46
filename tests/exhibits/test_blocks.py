"""The picture of a KV pool is drawn of tables that fit together."""

import pytest

from rosellm.roseinfer.exhibits import load_exhibit

_blocks = load_exhibit("blocks")
DiagramError, block_pool = _blocks.DiagramError, _blocks.block_pool


@pytest.mark.parametrize(
    "tables, lengths, message",
    [
        ({"A": [6]}, {"A": 1}, "A has block 6, but the pool has blocks 0 to 5"),
        ({"A": [0]}, {}, "the length of A is missing: there are none"),
        ({"A": [0]}, {"A": 65}, "A: 65 tokens do not fill 1 blocks of 64"),
        ({"A": [0, 1]}, {"A": 64}, "A: 64 tokens do not fill 2 blocks of 64"),
    ],
)
def test_a_pool_that_contradicts_its_tables_is_refused(tables, lengths, message):
    with pytest.raises(DiagramError, match=message):
        block_pool(tables, 6, lengths, 64, "t")
