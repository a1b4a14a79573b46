"""The command that records what the prefix cache saves."""

from __future__ import annotations

from rosellm.roseinfer.exhibits import load_exhibit
from tests.helpers import random_model, small_engine
from tests.lab.measuring import measured

shared_prompts = load_exhibit("shared_prompts")


def test_only_the_filled_way_finds_the_shared_tokens_in_every_request_and_the_cold_way_finds_none() -> None:
    engine = small_engine(random_model(0), prefix_cache=True)
    found = shared_prompts.batches(engine, 3, [0, 21], own=4, new_tokens=2, turns=2)
    cached = {n: {way: own["cached_tokens"] for way, own in ways.items()} for n, ways in found.items()}
    assert cached["0"] == {way: [0, 0] for way in ("cold", "empty", "filled")}
    assert cached["21"]["cold"] == [0, 0] and cached["21"]["filled"] == [3 * 21, 3 * 21]
    assert engine.prefix_cache is not None
    engine.prefix_cache.clear()
    engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


def test_the_record_has_every_turn_of_every_way(tmp_path) -> None:
    record = measured(tmp_path, "prefix_cache", "--repeats=2")
    figures, ways = record["figures"], ["cold", "empty", "filled"]
    assert list(figures["first_token"]) == list(figures["batch"]) == ["0", "96"]
    runs = [*figures["batch"].values(), figures["PFX"]["runs"]]
    assert all(list(one) == ways for one in runs)
    for one in [*figures["first_token"].values(), *runs]:
        assert all(len(own["seconds"]) == 2 and min(own["seconds"]) > 0 for own in one.values())
    assert record["size"] == "small" and figures["PFX"]["requests"] == figures["requests"] == 6
