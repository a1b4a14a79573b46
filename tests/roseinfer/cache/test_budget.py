"""The budget of KV blocks: what is free, promised and needed, against counts made by hand."""

from __future__ import annotations

from rosellm.roseinfer.engine import Engine
from tests.helpers import greedy_sequences, random_model, small_engine


def engine_of(**options) -> Engine:
    engine = small_engine(random_model(0), recipe="resident_step", num_kv_blocks=10, **options)  # of 8 tokens
    engine.budget.run_ahead = 0
    return engine


def test_promises_are_full_lengths_and_may_exceed_the_pool():
    engine = engine_of()
    one, two = greedy_sequences(engine, [[1] * 8, [2] * 9], [1, 40])
    assert [engine.budget.max_blocks(s) for s in (one, two)] == [1, 6]  # the last token is never cached
    for sequence in (one, two, two):
        engine.budget.reserve(sequence)
    assert (engine.budget.reserved, engine.budget.unreserved) == (13, -3)
    engine.budget.unreserve(two)
    assert (engine.budget.reserved, engine.budget.unreserved) == (7, 3)


def test_a_decode_needs_a_block_where_the_last_is_full_or_shared():
    engine = engine_of(prefix_cache=True)
    full, partial = greedy_sequences(engine, [[1] * 8, [2] * 7], 20)
    engine.prefill([full, partial])
    assert engine.budget.blocks_to_decode([full, partial]) == [1, 1]  # the cache shares both last blocks
    engine.prefix_cache.clear()
    assert engine.budget.blocks_to_decode([full, partial]) == [1, 0]
    assert engine.budget.blocks_to_decode([full, partial], steps=2) == [1, 1]
    assert engine.budget.blocks_to_decode([full, partial], steps=40) == [3, 3]  # to their ends
