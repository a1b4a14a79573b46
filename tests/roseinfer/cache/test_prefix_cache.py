"""The prefix cache: what it finds, who holds what, and that cached blocks are never written."""

from __future__ import annotations

import random
from os.path import commonprefix

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache, common_prefix
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


class Server:
    """What an engine does with a prefix cache; a token's key in layer l is ``token + 100 l``."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = KVBlocks(LAYERS, 1, 1, BLOCK, n_blocks, "cpu", torch.float32)
        self.cache = PrefixCache(self.blocks)

    def serve(self, prompt: list[int]) -> tuple[int, list[int]]:
        n_matched, block_ids = self.cache.match(prompt)
        self.cache.make_room(blocks_for(len(prompt), BLOCK), block_ids[-1:])
        try:
            self.blocks.reserve_prompt(block_ids, len(prompt) - n_matched)
        except KVCacheExhausted:
            self.release(block_ids)
            raise
        for position in range(n_matched, len(prompt)):
            self.write(block_ids, position, prompt[position])
        self.cache.insert(prompt, block_ids)
        return n_matched, block_ids

    def append(self, block_ids: list[int], token: int) -> None:
        self.cache.make_room(1, block_ids[-1:])
        self.blocks.reserve_prompt(block_ids, 1)
        self.write(block_ids, self.blocks.tokens_reserved(block_ids) - 1, token)

    def release(self, block_ids: list[int]) -> None:
        self.blocks.free_blocks(block_ids)

    def write(self, block_ids: list[int], position: int, token: int) -> None:
        for layer in range(LAYERS):
            place = layer, block_ids[position // BLOCK], 0, position % BLOCK
            self.blocks.k_cache[place] = token + 100.0 * layer
            self.blocks.v_cache[place] = -token - 100.0 * layer

    def cached(self, block_ids: list[int]) -> list[list[int]]:
        """The tokens that the blocks hold in each layer, told from the keys; the values must agree."""
        n, found = self.blocks.tokens_reserved(block_ids), []
        for layer in range(LAYERS):
            keys = self.blocks.k_cache[layer, block_ids, 0].flatten()[:n]
            assert (self.blocks.v_cache[layer, block_ids, 0].flatten()[:n] == -keys).all()
            found.append([int(x) - 100 * layer for x in keys.tolist()])
        return found


def both(tokens: list[int]) -> list[list[int]]:
    return [tokens] * LAYERS


def served(server: Server, prompt: list[int]) -> int:
    """Serve a prompt to its end; how many of its tokens were matched."""
    n_matched, block_ids = server.serve(prompt)
    server.release(block_ids)
    return n_matched


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_prompt_served_again_matches_all_but_its_last_token(length):
    server, prompt = Server(10), list(range(length))
    assert served(server, prompt) == 0
    n_matched, block_ids = server.cache.match(prompt)
    assert n_matched == length - 1
    assert server.cached(block_ids) == both(prompt[:-1])


@given(shared=st.lists(st.integers(0, 2)), a=st.lists(st.integers(0, 2)), b=st.lists(st.integers(0, 2)))
def test_a_common_prefix_is_as_long_as_the_library_s(shared: list[int], a: list[int], b: list[int]) -> None:
    one, other = tuple(shared + a), tuple(shared + b)
    assert common_prefix(one, other) == len(commonprefix([one, other]))


@pytest.mark.parametrize("common", range(10))
def test_the_longest_common_prefix_is_matched_token_by_token(common):
    server, prompt = Server(20), list(range(9))
    served(server, [50, 51])
    served(server, prompt[:2] + [90])
    served(server, prompt)
    query = prompt[:common] + [60, 61, 62, 63, 64]
    n_matched, block_ids = server.cache.match(query)
    assert n_matched == common
    assert server.cached(block_ids) == both(query[:common])


def test_full_blocks_are_shared_and_a_partly_matched_last_block_is_private():
    server, prompt = Server(10), list(range(11))
    _, first = server.serve(prompt)
    _, second = server.cache.match([*prompt[:10], 60, 61])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert [server.blocks.ref_count(i) for i in second] == [3, 3, 1]  # two sequences and the entry; a clone


def test_a_last_block_matched_to_its_end_is_shared_until_the_first_write():
    server, prompt = Server(10), list(range(6))
    _, first = server.serve(prompt)
    n_matched, second = server.cache.match([*prompt, 60])
    assert n_matched == 6 and second == first
    server.append(second, 60)
    assert server.cached(second) == both([*prompt, 60])
    assert server.cached(first) == both(prompt)


def test_a_sequence_that_goes_on_after_its_prompt_leaves_its_entry_alone():
    server, prompt = Server(10), list(range(6))
    _, block_ids = server.serve(prompt)
    for token in (70, 71, 72):
        server.append(block_ids, token)
    assert server.cached(block_ids) == both([*prompt, 70, 71, 72])
    n_matched, found = server.cache.match([*prompt, 80])
    assert n_matched == 6
    assert server.cached(found) == both(prompt)


def test_the_least_recently_used_entry_is_evicted_first():
    server, prompts = Server(6), [[10] * 8, [20] * 8, [30] * 8]
    for prompt in prompts:
        served(server, prompt)
    n_matched, block_ids = server.cache.match([*prompts[0][:4], 99])  # makes the first the most recent
    server.release(block_ids)
    server.cache.make_room(2)
    assert n_matched == 4 and len(server.cache) == 2
    assert [server.cache.match(p)[0] for p in (prompts[1], prompts[0], prompts[2])] == [0, 7, 7]


def test_a_prompt_that_an_entry_begins_with_refreshes_it_and_adds_none():
    server = Server(6)
    served(server, [10] * 8)
    served(server, [20] * 8)
    served(server, [10] * 5)
    assert len(server.cache) == 2
    server.cache.make_room(3)
    assert server.cache.match([20] * 8)[0] == 0
    assert server.cache.match([10] * 8)[0] > 0


def test_an_entry_whose_blocks_others_hold_is_not_evicted_in_vain():
    server, running, idle = Server(6), [10] * 8, [20] * 8
    _, block_ids = server.serve(running)
    served(server, idle)
    server.cache.make_room(4)
    assert list(server.cache._entries) == [tuple(running)] and server.blocks.num_free_blocks() == 4
    server.cache.make_room(6)
    assert list(server.cache._entries) == [tuple(running)]
    server.release(block_ids)
    server.cache.make_room(6)
    assert len(server.cache) == 0 and server.blocks.num_free_blocks() == 6


def test_an_entry_that_others_build_upon_outlives_them():
    server, stem = Server(6), [10] * 4
    served(server, stem)
    served(server, [*stem, 1, 2, 3, 4])
    served(server, [*stem, 5, 6, 7, 8])
    server.cache.make_room(4)
    assert list(server.cache._entries) == [tuple(stem), (*stem, 5, 6, 7, 8)]
    server.cache.make_room(6)
    assert len(server.cache) == 0


def test_entries_that_hold_the_same_blocks_go_together():
    server = Server(2)
    _, block_ids = server.serve([1, 2])
    server.append(block_ids, 3)
    server.cache.clear()
    server.cache.insert([1], block_ids)
    server.cache.insert([1, 2], block_ids)
    server.release(block_ids)
    assert server.cache.num_evictable() == 1
    server.cache.make_room(2)
    assert len(server.cache) == 0


def test_an_entry_goes_that_shares_a_block_to_be_written_where_no_other_is_left_for_a_clone():
    server = Server(1)
    _, block_ids = server.serve([1, 2])
    server.cache.make_room(1)
    assert len(server.cache) == 1
    server.append(block_ids, 3)
    assert len(server.cache) == 0 and server.cached(block_ids) == both([1, 2, 3])


def test_evictable_blocks_are_known_without_looking_at_any(monkeypatch):
    server = Server(40)
    for start in range(20):
        served(server, [start] * 8)
    looked_at = []
    monkeypatch.setattr(server.blocks, "ref_count", looked_at.append)
    monkeypatch.setattr(server.cache, "holdings", lambda: looked_at.append("all"))
    server.cache._entries = Untouched(server.cache._entries)
    assert server.cache.num_evictable() == 40
    assert looked_at == []


class Untouched(dict):
    """Entries that may not be gone through."""

    def values(self):
        raise AssertionError("the entries are gone through")

    items = __iter__ = values


@settings(max_examples=60, deadline=None)
@given(program=st.lists(st.tuples(st.sampled_from("smiarrec"), st.integers(0, 255)), max_size=40))
def test_evictable_blocks_are_those_that_only_entries_hold(program):
    server, holders = Server(12), []
    for name, n in program:
        prompt = [int(bit) for bit in f"{n:08b}"][: 1 + n % 8]
        if name == "s" and len(holders) < 3:
            holders.append(server.serve(prompt)[1])
        elif name == "m" and len(holders) < 3:
            holders.append(server.cache.match(prompt)[1])
        elif name == "e":
            server.cache.make_room(n % 13)
        elif name == "c":
            server.cache.clear()
        elif holders and name == "r":
            server.release(holders.pop(n % len(holders)))
        elif holders and holders[n % len(holders)] and name == "a":
            server.append(holders[n % len(holders)], n % 2)
        elif holders and name == "i":
            held = server.cached(holders[n % len(holders)])[0]
            server.cache.insert(held[: 1 + n % 9], holders[n % len(holders)])
        theirs = {block for ids in holders for block in ids}
        cached = {block for ids in server.cache._entries.values() for block in ids}
        assert server.cache.num_evictable() == len(cached - theirs)


def test_eviction_leaves_the_blocks_of_running_sequences_in_place():
    server, prompt = Server(3), list(range(6))
    _, block_ids = server.serve(prompt)
    server.cache.clear()
    assert len(server.cache) == 0
    assert server.blocks.num_free_blocks() == 1
    assert server.cached(block_ids) == both(prompt)
    server.append(block_ids, 70)
    assert server.cached(block_ids) == both([*prompt, 70])


def test_room_is_made_for_a_clone():
    server = Server(4)
    served(server, [50] * 8)
    _, running = server.serve([1, 2, 3, 4, 5, 6])
    assert server.blocks.num_free_blocks() == 0
    n_matched, block_ids = server.cache.match([1, 2, 3, 4, 5, 60])
    assert n_matched == 5
    assert server.cached(block_ids) == both([1, 2, 3, 4, 5])
    assert server.cached(running) == both([1, 2, 3, 4, 5, 6])


def test_without_a_block_for_a_clone_only_full_blocks_are_matched():
    server = Server(2)
    _, running = server.serve([1, 2, 3, 4, 5, 6])
    n_matched, block_ids = server.cache.match([1, 2, 3, 4, 5, 60])
    assert n_matched == 4
    assert block_ids == running[:1]
    assert (server.cache.hits, server.cache.hit_tokens) == (1, 4)


def test_a_match_that_comes_to_nothing_holds_nothing_and_is_no_hit():
    server = Server(1)
    _, running = server.serve([1, 2, 3])
    n_matched, block_ids = server.cache.match([1, 2, 60])
    assert (n_matched, block_ids) == (0, [])
    assert server.blocks.ref_count(running[0]) == 2  # theirs and the entry's
    assert (server.cache.hits, server.cache.hit_tokens) == (0, 0)


def test_hits_count_matches_and_their_tokens():
    server = Server(10)
    for prompt in ([1, 2, 3], [1, 2, 4], [9], [1, 2, 3]):
        served(server, prompt)
    assert (server.cache.hits, server.cache.hit_tokens) == (2, 4)


def test_clear_returns_every_block():
    server = Server(10)
    for prompt in random_prompts([9, 4, 5]):
        served(server, prompt)
    server.cache.clear()
    assert len(server.cache) == 0
    assert server.blocks.num_free_blocks() == 10


def test_lookup_compares_a_query_with_few_entries():
    compared = []

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            compared.append(other)
            return int(self) == int(other)

    server, rng = Server(1000), random.Random(0)
    for _ in range(500):
        served(server, [1, 2, 3, *(rng.randrange(100) for _ in range(4))])
    n_matched, _ = server.cache.match([Token(t) for t in (1, 2, 3, 200, 201)])
    assert n_matched == 3
    assert len(compared) < 100


@pytest.fixture(scope="module")
def gpt():
    return random_model(seed=5)


@pytest.fixture(params=["resident_step", "split_kv"])
def rung(request) -> str:
    return request.param


def test_an_engine_gives_the_same_tokens_with_a_prefix_cache_as_without(gpt, rung):
    stem = random_prompts([19])[0]
    waves = [
        [stem[:n] + tail for n, tail in ((19, [1]), (16, [2, 3]), (5, [4]))],
        [stem, stem[:16], [*stem, 7, 8]],
    ]
    plain, caching = small_engine(gpt, recipe=rung), small_engine(gpt, recipe=rung, prefix_cache=True)
    for prompts in waves:
        assert generate(caching, prompts, 12) == generate(plain, prompts, 12)
    assert caching.prefix_cache.hit_tokens >= 18 + 15 + 19


def test_an_engine_short_of_blocks_evicts_entries_and_gives_the_same_tokens(gpt, rung):
    prompts = [[*p[:cut], 1, 2, 3] for p in random_prompts([17, 24, 3, 30], seed=3) for cut in (30, 8)]
    plain, caching = (
        small_engine(gpt, recipe=rung),
        small_engine(gpt, recipe=rung, prefix_cache=True, num_kv_blocks=7),
    )
    for prompt in prompts:
        assert generate(caching, [prompt], 9) == generate(plain, [prompt], 9)
    assert caching.prefix_cache.hits > 0
    assert len(caching.prefix_cache) < len(prompts)


def test_entries_survive_decode_steps_that_need_no_block(gpt):
    engine = small_engine(gpt, recipe="resident_step", prefix_cache=True, num_kv_blocks=5)  # of 8 tokens
    engine.budget.run_ahead = 0
    (one,) = greedy_sequences(engine, random_prompts([8]), 20)
    generate(engine, random_prompts([9], seed=1), 1)
    engine.prefill([one])
    left = [
        (engine.decode([one]), engine.blocks.num_free_blocks(), len(engine.prefix_cache))[1:]
        for _ in range(17)
    ]
    assert left[:8] == [(1, 2)] * 8
    assert left[8:16] == [(0, 2)] * 8
    assert left[16:] == [(1, 1)]
    assert one.output == uncached_greedy(gpt, one.prompt, one.n_output)


def test_a_step_evicts_for_a_shared_last_block_that_it_has_to_clone(gpt):
    engine = small_engine(gpt, recipe="resident_step", prefix_cache=True, num_kv_blocks=3)
    generate(engine, random_prompts([9], seed=1), 1)
    (one,) = greedy_sequences(engine, random_prompts([5]), 4)
    engine.prefill([one])
    assert (engine.blocks.num_free_blocks(), len(engine.prefix_cache)) == (0, 2)
    engine.decode([one])
    assert list(engine.prefix_cache._entries) == [tuple(one.prompt)]
    assert decode_all(engine, [one]) == [uncached_greedy(gpt, one.prompt, 4)]


def test_a_prompt_evicts_for_the_blocks_that_its_match_does_not_bring(gpt, rung):
    engine = small_engine(gpt, recipe=rung, prefix_cache=True, num_kv_blocks=6)
    stem, other = random_prompts([16, 9])
    generate(engine, [other], 1)
    generate(engine, [stem], 1)
    sequences = greedy_sequences(engine, [[*stem, 1], [*stem, 2]], 1)
    engine.prefill(sequences)
    assert len(engine.prefix_cache) == 4 and engine.blocks.num_free_blocks() == 0
    assert [s.output for s in sequences] == [uncached_greedy(gpt, s.prompt, 1) for s in sequences]


@pytest.mark.parametrize("seed", range(3))
def test_sequences_whose_needs_fit_the_cache_never_exhaust_it(gpt, rung, seed):
    rng = random.Random(seed)
    stems = random_prompts([20, 20, 11], seed=seed)
    engine = small_engine(gpt, recipe=rung, prefix_cache=True, num_kv_blocks=14)
    running = []
    for _ in range(25):
        room = engine.num_kv_blocks - sum(engine.budget.max_blocks(s) for s in running)
        prompts = [rng.choice(stems)[: rng.randrange(1, 20)] + [rng.randrange(3)] for _ in range(4)]
        new = greedy_sequences(engine, prompts, rng.randrange(1, 20))
        while sum(engine.budget.max_blocks(s) for s in new) > room:
            new.pop()
        if new:
            engine.prefill(new)
        running += new
        for _ in range(rng.randrange(6)):
            running = [s for s in running if not s.is_finished or engine.release(s)]
            if running:
                engine.decode(running)
        engine.check_integrity()
    assert engine.prefix_cache.hits > 5
    for sequence in running:
        assert sequence.output == uncached_greedy(gpt, sequence.prompt, sequence.n_output)


def test_an_engine_returns_every_block_once_its_prefix_cache_is_cleared(gpt, rung):
    engine = small_engine(gpt, recipe=rung, prefix_cache=True)
    generate(engine, random_prompts([9, 17]), 10)
    engine.prefix_cache.clear()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks
