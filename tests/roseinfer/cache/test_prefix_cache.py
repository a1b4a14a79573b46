"""The prefix cache: what it finds, who holds what, and that cached blocks are never written."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache
from tests.helpers import (
    decode_all,
    generate,
    greedy_sequences,
    random_model,
    random_prompts,
    small_engine,
    uncached_greedy,
)

LAYERS, BLOCK = 2, 4
LAYER_STEPS = np.arange(LAYERS) * 100.0  # a token's key in layer l is token + 100 l
MODEL = random_model(seed=5)
BOTH_RUNGS = pytest.mark.parametrize("rung", ["resident_step", "split_kv"])


class Server:
    """What an engine does with a prefix cache."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = KVBlocks(LAYERS, 1, 1, BLOCK, n_blocks, "cpu", torch.float32)
        self.cache = PrefixCache(self.blocks)
        self.keys = self.blocks.k_cache.numpy()[:, :, 0, :, 0]  # [L, N_BLOCKS, BLOCK], the cache itself

    def serve(self, prompt: list[int]) -> list[int]:
        n_matched, block_ids = self.cache.match(prompt)
        self.cache.make_room(blocks_for(len(prompt), BLOCK), block_ids[-1:])
        self.write(block_ids, prompt[n_matched:])
        self.cache.insert(prompt, block_ids)
        return block_ids

    def serve_and_release(self, *prompts: list[int]) -> None:
        for prompt in prompts:
            self.blocks.free_blocks(self.serve(prompt))

    def append(self, block_ids: list[int], *tokens: int) -> None:
        for token in tokens:
            self.cache.make_room(1, block_ids[-1:])
            self.write(block_ids, [token])

    def write(self, block_ids: list[int], tokens: list[int]) -> None:
        for token in tokens:
            self.blocks.reserve_prompt(block_ids, 1)
            position = self.blocks.tokens_reserved(block_ids) - 1
            self.keys[:, block_ids[position // BLOCK], position % BLOCK] = token + LAYER_STEPS

    def cached(self, block_ids: list[int]) -> list[int]:
        """The tokens that the blocks hold, the same in every layer."""
        n_tokens = self.blocks.tokens_reserved(block_ids)
        first, second = self.keys[:, block_ids].reshape(LAYERS, -1)[:, :n_tokens].tolist()
        assert second == [key + LAYER_STEPS[1] for key in first]
        return first


@pytest.mark.parametrize("common", range(10))
def test_the_longest_common_prefix_is_matched_token_by_token(common):
    server, prompt = Server(20), list(range(9))
    server.serve_and_release([50, 51], prompt[:2] + [90], prompt)
    query = prompt[:common] + [60, 61, 62, 63, 64]
    n_matched, block_ids = server.cache.match(query)
    assert n_matched == common
    assert server.cached(block_ids) == query[:common]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_prompt_served_again_matches_all_but_its_last_token(length):
    server, prompt = Server(10), list(range(length))
    server.serve_and_release(prompt)
    n_matched, block_ids = server.cache.match(prompt)
    assert (n_matched, server.cached(block_ids)) == (length - 1, prompt[:-1])
    assert (server.cache.hits, server.cache.hit_tokens) == (length > 1, length - 1)


def test_full_blocks_are_shared_and_a_last_one_is_private_before_it_is_written():
    server, prompt = Server(12), list(range(11))
    first = server.serve(prompt)
    _, cut = server.cache.match([*prompt[:10], 60, 61])
    assert cut[:2] == first[:2] and cut[2] != first[2]
    assert [server.blocks.ref_count(i) for i in cut] == [3, 3, 1]  # two sequences and the entry; a clone
    _, whole = server.cache.match([*prompt, 60])
    assert whole == first
    server.append(whole, 60)
    server.append(first, 70, 71)
    _, again = server.cache.match([*prompt, 80])
    assert list(map(server.cached, (whole, first, again))) == [[*prompt, 60], [*prompt, 70, 71], prompt]


def test_the_least_recently_used_entry_is_evicted_first_and_a_prefix_of_one_refreshes_it():
    server, prompts = Server(8), [[10] * 8, [20] * 8, [30] * 8]
    server.serve_and_release(*prompts, prompts[0][:5])
    assert len(server.cache) == 3
    server.cache.make_room(4)
    assert [server.cache.match(p)[0] for p in (prompts[1], prompts[0], prompts[2])] == [0, 7, 7]


def test_no_entry_is_evicted_in_vain_and_one_that_others_build_upon_outlives_them():
    server, stem = Server(8), [10] * 4
    server.serve_and_release(stem, [*stem, 1, 2, 3, 4], [*stem, 5, 6, 7, 8])
    running = server.serve([20] * 8)
    server.cache.make_room(4)
    assert list(server.cache._entries) == [tuple(stem), (*stem, 5, 6, 7, 8), (20,) * 8]
    server.cache.make_room(8)
    assert list(server.cache._entries) == [(20,) * 8] and server.cached(running) == [20] * 8
    server.blocks.free_blocks(running)
    server.cache.make_room(8)
    assert len(server.cache) == 0 and server.blocks.num_free_blocks() == 8


def test_a_match_clones_where_a_block_is_free_or_can_be_evicted_else_it_takes_full_blocks_alone():
    server = Server(4)
    server.serve_and_release([50] * 8)
    running = server.serve([1, 2, 3, 4, 5, 6])
    assert server.blocks.num_free_blocks() == 0
    n_cloned, cloned = server.cache.match([1, 2, 3, 4, 5, 60])
    assert (n_cloned, server.cached(cloned), len(server.cache)) == (5, [1, 2, 3, 4, 5], 1)
    server.append(cloned, 7, 8, 9, 10)
    n_full, full = server.cache.match([1, 2, 3, 4, 5, 61])
    assert (n_full, full) == (4, running[:1]) and server.cached(running) == [1, 2, 3, 4, 5, 6]


def test_a_match_that_comes_to_nothing_holds_nothing_and_is_no_hit():
    server = Server(1)
    running = server.serve([1, 2, 3])
    assert server.cache.match([1, 2, 60]) == (0, [])
    assert server.blocks.ref_count(running[0]) == 2  # theirs and the entry's
    assert (server.cache.hits, server.cache.hit_tokens) == (0, 0)


def test_evictable_blocks_are_known_without_looking_at_any(monkeypatch):
    class Untouched(dict):
        """Entries that may not be gone through."""

        def values(self):
            raise AssertionError("the entries are gone through")

        items = __iter__ = values

    server, looked_at = Server(40), []
    server.serve_and_release(*([start] * 8 for start in range(20)))
    monkeypatch.setattr(server.blocks, "ref_count", looked_at.append)
    monkeypatch.setattr(server.cache, "holdings", lambda: looked_at.append("all"))
    server.cache._entries = Untouched(server.cache._entries)
    assert server.cache.num_evictable() == 40
    assert looked_at == []


def test_lookup_compares_a_query_with_few_entries():
    compared = []

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            compared.append(other)
            return int(self) == int(other)

    server, rng = Server(1000), random.Random(0)
    server.serve_and_release(*([1, 2, 3, *(rng.randrange(100) for _ in range(4))] for _ in range(500)))
    n_matched, _ = server.cache.match([Token(t) for t in (1, 2, 3, 200, 201)])
    assert n_matched == 3
    assert len(compared) < 100


@BOTH_RUNGS
def test_an_engine_short_of_blocks_evicts_entries_and_gives_the_same_tokens(rung):
    prompts = [[*p[:cut], 1, 2, 3] for p in random_prompts([17, 24, 3, 30], seed=3) for cut in (30, 8)]
    plain = small_engine(MODEL, recipe=rung)
    caching = small_engine(MODEL, recipe=rung, prefix_cache=True, num_kv_blocks=7)
    for prompt in prompts:
        assert generate(caching, [prompt], 9) == generate(plain, [prompt], 9)
    assert caching.prefix_cache.hits > 0
    assert len(caching.prefix_cache) < len(prompts)
    caching.prefix_cache.clear()
    assert caching.blocks.num_free_blocks() == 7


def test_entries_survive_decode_steps_that_need_no_block():
    engine = small_engine(MODEL, recipe="resident_step", prefix_cache=True, num_kv_blocks=5)  # of 8 tokens
    engine.budget.run_ahead = 0
    (one,) = greedy_sequences(engine, random_prompts([8]), 20)
    generate(engine, random_prompts([9], seed=1), 1)
    engine.prefill([one])
    left = []
    for _ in range(17):
        engine.decode([one])
        left.append((engine.blocks.num_free_blocks(), len(engine.prefix_cache)))
    assert left == [(1, 2)] * 8 + [(0, 2)] * 8 + [(1, 1)]
    assert one.output == uncached_greedy(MODEL, one.prompt, one.n_output)


def test_a_step_evicts_for_a_shared_last_block_that_it_has_to_clone():
    engine = small_engine(MODEL, recipe="resident_step", prefix_cache=True, num_kv_blocks=3)
    generate(engine, random_prompts([9], seed=1), 1)
    (one,) = greedy_sequences(engine, random_prompts([5]), 4)
    engine.prefill([one])
    assert (engine.blocks.num_free_blocks(), len(engine.prefix_cache)) == (0, 2)
    engine.decode([one])
    assert list(engine.prefix_cache._entries) == [tuple(one.prompt)]
    assert decode_all(engine, [one]) == [uncached_greedy(MODEL, one.prompt, 4)]


@BOTH_RUNGS
def test_a_prompt_evicts_for_the_blocks_that_its_match_does_not_bring(rung):
    engine = small_engine(MODEL, recipe=rung, prefix_cache=True, num_kv_blocks=6)
    stem, other = random_prompts([16, 9])
    generate(engine, [other], 1)
    generate(engine, [stem], 1)
    sequences = greedy_sequences(engine, [[*stem, 1], [*stem, 2]], 1)
    engine.prefill(sequences)
    assert len(engine.prefix_cache) == 4 and engine.blocks.num_free_blocks() == 0
    assert [s.output for s in sequences] == [uncached_greedy(MODEL, s.prompt, 1) for s in sequences]
