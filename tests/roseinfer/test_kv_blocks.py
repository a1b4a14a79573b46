"""The block manager against a plain dictionary of what every holder cached."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from rosellm.errors import KVCacheExhausted, RoseError
from rosellm.roseinfer.kv_blocks import KVBlockInfo, KVBlockManager, MutableKVBlockInfo, blocks_for

LAYERS, HEADS, DIM, BLOCK, POOL = 2, 2, 3, 4, 9


def make_manager(block_info: str = "slots", **changes) -> KVBlockManager:
    sizes = {
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "head_dim": DIM,
        "block_size": BLOCK,
        "max_blocks_per_layer": POOL,
        "device": "cpu",
        "dtype": torch.float32,
    }
    return KVBlockManager(**(sizes | changes), block_info=block_info)


def books(manager: KVBlockManager) -> tuple:
    """Everything that a failed call must leave alone."""
    ids = range(manager.num_pools * manager.max_blocks_per_layer)
    held = {b: (manager.ref_count(b), copy.copy(manager.info(b))) for b in ids if manager.ref_count(b)}
    free = [manager.num_free_blocks(pool) for pool in range(manager.num_pools)]
    return held, free, manager.k_cache.clone(), manager.v_cache.clone()


def same_books(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])


def keys_of(tokens: list[float], layer: int) -> torch.Tensor:
    """The keys ``[n, H, D]`` of these tokens in a layer; values are their negatives."""
    element = torch.arange(HEADS * DIM).view(HEADS, DIM) / 16
    return torch.tensor(tokens)[:, None, None] + element + 10_000 * layer


class Holder:
    """One sequence's blocks in one pool, and the plain record of what it cached: one number a token."""

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.block_ids: list[int] = []
        self.tokens: list[float] = []


class BlockMachine(RuleBasedStateMachine):
    """Random operations on holders; the dictionary ``holders`` is the truth."""

    block_info, pool_kind, pools = "slots", "per_layer", range(LAYERS)
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager(self.block_info, pool=self.pool_kind)
        self.holders: dict[int, Holder] = {}
        self.made = 0
        self.token = 0.0

    def new_tokens(self, n: int) -> list[float]:
        tokens = [self.token + i + 1 for i in range(n)]
        self.token += n
        return tokens

    def layers(self, pool: int) -> list[int]:
        return [pool]

    def append(self, pool: int, lists: list[list[int]], tokens: list[float]) -> None:
        keys = keys_of(tokens, layer=pool)
        self.manager.append_token_batch(pool, lists, keys, -keys)

    def add(self, holder: Holder) -> int:
        self.made += 1
        self.holders[self.made] = holder
        return self.made

    def users(self, block_id: int) -> int:
        return sum(block_id in h.block_ids for h in self.holders.values())

    def free(self, pool: int) -> int:
        return POOL - len({b for h in self.holders.values() if h.pool == pool for b in h.block_ids})

    def new_blocks(self, holder: Holder, n: int) -> int:
        """Blocks that ``n`` more tokens take: new ones, and a clone of a shared, partly filled last block."""
        partial = len(holder.tokens) % BLOCK
        clone = bool(n and partial) and self.users(holder.block_ids[-1]) > 1
        return blocks_for(len(holder.tokens) + n, BLOCK) - len(holder.block_ids) + clone

    @rule(target=ids, data=st.data())
    def start(self, data):
        pools = data.draw(st.lists(st.sampled_from(self.pools), min_size=1, max_size=4))
        return multiple(*(self.add(Holder(pool)) for pool in pools))

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def append_to_a_batch(self, data):
        pool = data.draw(st.sampled_from(sorted({h.pool for h in self.holders.values()})))
        here = [h for h in self.holders.values() if h.pool == pool]
        rows = data.draw(st.lists(st.sampled_from(here), min_size=1, unique_by=id))
        tokens = self.new_tokens(len(rows))
        lists = [h.block_ids for h in rows]
        if sum(self.new_blocks(h, 1) for h in rows) > self.free(pool):
            before, old = books(self.manager), copy.deepcopy(lists)
            with pytest.raises(KVCacheExhausted):
                self.append(pool, lists, tokens)
            assert same_books(before, books(self.manager)) and lists == old
            return
        self.append(pool, lists, tokens)
        for holder, token in zip(rows, tokens, strict=True):
            holder.tokens.append(token)

    @rule(i=ids, n=st.integers(0, 3 * BLOCK))
    def prompt(self, i, n):
        holder = self.holders[i]
        if self.new_blocks(holder, n) > self.free(holder.pool):
            before, old = books(self.manager), list(holder.block_ids)
            with pytest.raises(KVCacheExhausted):
                self.manager.reserve_prompt(holder.pool, holder.block_ids, n)
            assert same_books(before, books(self.manager)) and holder.block_ids == old
            return
        self.manager.reserve_prompt(holder.pool, holder.block_ids, n)
        tokens = self.new_tokens(n)
        for layer in self.layers(holder.pool):
            for position, key in enumerate(keys_of(tokens, layer), start=len(holder.tokens)):
                block = holder.block_ids[position // BLOCK] - holder.pool * POOL
                self.manager.k_cache[layer, block, :, position % BLOCK] = key
                self.manager.v_cache[layer, block, :, position % BLOCK] = -key
        holder.tokens += tokens

    @rule(target=ids, i=ids, data=st.data())
    def share(self, i, data):
        source = self.holders[i]
        n_blocks = data.draw(st.integers(0, len(source.block_ids)))
        twin = Holder(source.pool)
        twin.block_ids, twin.tokens = source.block_ids[:n_blocks], source.tokens[: n_blocks * BLOCK]
        self.manager.incref_blocks(twin.block_ids)
        return self.add(twin)

    @rule(i=ids, data=st.data())
    def clone(self, i, data):
        holder = self.holders[i]
        if not holder.block_ids:
            return
        kept = data.draw(st.integers(1, len(holder.tokens) - BLOCK * (len(holder.block_ids) - 1)))
        if self.free(holder.pool) == 0:
            before = books(self.manager)
            with pytest.raises(KVCacheExhausted):
                self.manager.clone_block(holder.block_ids[-1], kept)
            assert same_books(before, books(self.manager))
            return
        holder.block_ids[-1] = self.manager.clone_block(holder.block_ids[-1], kept)
        del holder.tokens[BLOCK * (len(holder.block_ids) - 1) + kept :]

    @rule(i=consumes(ids))
    def release(self, i):
        holder = self.holders.pop(i)
        self.manager.free_blocks(holder.block_ids)

    @rule(i=ids)
    def share_with_a_free_block_changes_nothing(self, i):
        holder = self.holders[i]
        free = [b for b in range(holder.pool * POOL, (holder.pool + 1) * POOL) if self.users(b) == 0]
        if not free:
            return
        before = books(self.manager)
        with pytest.raises(KeyError):
            self.manager.incref_blocks([*holder.block_ids, free[0]])
        with pytest.raises(KeyError):
            self.manager.free_blocks([*holder.block_ids, free[0]])
        assert same_books(before, books(self.manager))

    @invariant()
    def books_are_right(self):
        self.manager.check_integrity()
        assert self.manager.num_pools == len(self.pools)
        for pool in self.pools:
            assert self.manager.num_free_blocks(pool) == self.free(pool)
        for holder in self.holders.values():
            for i, block_id in enumerate(holder.block_ids):
                info = self.manager.info(block_id)
                length = min(BLOCK, len(holder.tokens) - i * BLOCK)
                assert (info.layer, info.start, info.length) == (holder.pool, i * BLOCK, length)
                assert info.block_index == block_id - holder.pool * POOL
                assert self.manager.ref_count(block_id) == self.users(block_id)

    @invariant()
    def contents_are_right(self):
        for holder in self.holders.values():
            blocks = torch.tensor(holder.block_ids, dtype=torch.long) - holder.pool * POOL
            for layer in self.layers(holder.pool):
                wanted = keys_of(holder.tokens, layer)
                for cache, sign in ((self.manager.k_cache, 1), (self.manager.v_cache, -1)):
                    held = cache[layer, blocks].transpose(1, 2).reshape(-1, HEADS, DIM)
                    assert torch.equal(held[: len(holder.tokens)], sign * wanted)


class TupleBlockMachine(BlockMachine):
    block_info = "tuple"


class SharedPoolMachine(BlockMachine):
    """One pool for all layers: slots are reserved once, and every layer is written."""

    pool_kind, pools = "shared", range(1)

    def layers(self, pool: int) -> list[int]:
        return list(range(LAYERS))

    def append(self, pool: int, lists: list[list[int]], tokens: list[float]) -> None:
        block_idx, pos = self.manager.reserve_tokens(pool, lists)
        for layer in range(LAYERS):
            keys = keys_of(tokens, layer)
            self.manager.k_cache[layer, block_idx, :, pos] = keys
            self.manager.v_cache[layer, block_idx, :, pos] = -keys


class TupleSharedPoolMachine(SharedPoolMachine):
    block_info = "tuple"


STEPS = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestSlots = BlockMachine.TestCase
TestSlots.settings = STEPS
TestTuples = TupleBlockMachine.TestCase
TestTuples.settings = STEPS
TestSharedSlots = SharedPoolMachine.TestCase
TestSharedSlots.settings = STEPS
TestSharedTuples = TupleSharedPoolMachine.TestCase
TestSharedTuples.settings = STEPS


def token(value: float, n: int = 1) -> torch.Tensor:
    return torch.full((n, HEADS, DIM), float(value))


@pytest.mark.parametrize(("block_info", "kind"), [("tuple", KVBlockInfo), ("slots", MutableKVBlockInfo)])
def test_block_info_is_a_tuple_rebuilt_or_a_record_incremented_in_place(block_info, kind):
    manager, ids = make_manager(block_info), []
    manager.append_token(0, ids, token(1)[0], token(1)[0])
    first = manager.info(ids[0])
    manager.append_token(0, ids, token(2)[0], token(2)[0])
    assert type(first) is kind
    assert (manager.info(ids[0]) is first) == (kind is MutableKVBlockInfo)
    assert manager.info(ids[0]).length == 2


@pytest.mark.parametrize("block_info", ["tuple", "slots"])
def test_positions_are_those_before_the_increment(block_info):
    manager, ids = make_manager(block_info), [[]]
    assert [manager.reserve_tokens(1, ids).pos for _ in range(BLOCK + 1)] == [[0], [1], [2], [3], [0]]


def test_a_full_shared_block_is_followed_by_a_new_one_and_not_cloned():
    manager, mine = make_manager(), []
    manager.reserve_prompt(0, mine, BLOCK)
    theirs = list(mine)
    manager.incref_blocks(theirs)
    manager.append_token(0, mine, token(1)[0], token(1)[0])
    assert mine[0] == theirs[0] and len(mine) == 2
    assert manager.ref_count(mine[0]) == 2


def test_a_shared_partial_block_is_cloned_before_the_write_so_the_other_holder_sees_nothing():
    manager, mine = make_manager(), []
    manager.append_token(0, mine, token(1)[0], token(1)[0])
    theirs = list(mine)
    manager.incref_blocks(theirs)
    before = manager.k_cache[0, manager.info(theirs[0]).block_index].clone()
    manager.append_token(0, mine, token(2)[0], token(2)[0])
    assert mine != theirs
    assert torch.equal(manager.k_cache[0, manager.info(theirs[0]).block_index], before)
    assert manager.info(theirs[0]).length == 1 and manager.info(mine[0]).length == 2


def test_a_shared_pool_is_one_pool_of_which_a_block_is_the_same_index_in_every_layer():
    separate, shared = make_manager(), make_manager(pool="shared")
    assert (separate.num_pools, separate.pool_of) == (LAYERS, tuple(range(LAYERS)))
    assert (shared.num_pools, shared.pool_of) == (1, (0,) * LAYERS)
    assert shared.k_cache.shape == separate.k_cache.shape
    ids = []
    shared.reserve_prompt(0, ids, POOL * BLOCK)
    assert sorted(ids) == list(range(POOL)) and shared.num_free_blocks() == 0
    assert [shared.info(i).block_index for i in ids] == ids


@pytest.mark.parametrize("pool", ["per_layer", "shared"])
def test_a_clone_copies_the_block_in_every_layer_of_its_pool_and_in_no_other(pool):
    manager, mine = make_manager(pool=pool), []
    for cache in (manager.k_cache, manager.v_cache):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(len(pool))))
    last = manager.num_pools - 1
    manager.reserve_prompt(last, mine, BLOCK + 2)
    manager.incref_blocks(mine)
    source = manager.info(mine[1]).block_index
    before = [manager.k_cache.clone(), manager.v_cache.clone()]
    target = manager.info(manager.clone_block(mine[1], 2)).block_index
    of_pool = [layer for layer in range(LAYERS) if manager.pool_of[layer] == last]
    for cache, old in zip((manager.k_cache, manager.v_cache), before, strict=True):
        expected = old.clone()
        expected[of_pool, target] = old[of_pool, source]
        assert torch.equal(cache, expected) and not torch.equal(cache, old)


def test_appends_layer_by_layer_are_refused_in_a_shared_pool_and_change_nothing():
    manager, ids = make_manager(pool="shared"), []
    before = books(manager)
    with pytest.raises(
        RoseError, match="pool='shared' keeps one set of books for 2 layers; use reserve_tokens"
    ):
        manager.append_token(0, ids, token(1)[0], token(1)[0])
    with pytest.raises(RoseError, match="pool='shared'"):
        manager.append_token_batch(0, [ids], token(1), token(1))
    assert same_books(before, books(manager)) and ids == []


def test_exhaustion_of_a_shared_pool_says_so():
    manager = make_manager(max_blocks_per_layer=2, pool="shared")
    with pytest.raises(KVCacheExhausted, match="the shared pool needs 3 more KV blocks and 2 of 2 are free"):
        manager.reserve_prompt(0, [], 3 * BLOCK)


def test_an_append_writes_its_slots_only():
    manager = make_manager()
    manager.k_cache.fill_(float("nan"))
    manager.v_cache.fill_(float("nan"))
    lists = [[], []]
    manager.append_token_batch(1, lists, token(1, 2), token(2, 2))
    written = torch.zeros(LAYERS, POOL, HEADS, BLOCK, DIM, dtype=torch.bool)
    for ids in lists:
        written[1, ids[0] - POOL, :, 0] = True
    assert torch.equal(manager.k_cache.isnan(), ~written)
    assert torch.equal(manager.v_cache.isnan(), ~written)


def test_exhaustion_names_the_layer_and_the_counts():
    manager = make_manager(max_blocks_per_layer=2)
    with pytest.raises(KVCacheExhausted, match="layer 1 needs 3 more KV blocks and 2 of 2 are free"):
        manager.reserve_prompt(1, [], 3 * BLOCK)


def test_a_prompt_counts_the_clone_of_a_shared_block_among_its_needs():
    manager, mine = make_manager(max_blocks_per_layer=2), []
    manager.reserve_prompt(0, mine, 1)
    manager.incref_blocks(mine)
    before, old = books(manager), list(mine)
    with pytest.raises(KVCacheExhausted, match="layer 0 needs 2 more KV blocks and 1 of 2 are free"):
        manager.reserve_prompt(0, mine, BLOCK)
    assert same_books(before, books(manager)) and mine == old


@pytest.mark.parametrize("holders", [1, 2])
def test_blocks_that_more_would_leave_than_hold_them_stay_as_they_are(holders):
    manager, mine = make_manager(), []
    manager.reserve_prompt(0, mine, 2 * BLOCK)
    for _ in range(holders - 1):
        manager.incref_blocks(mine)
    before = books(manager)
    with pytest.raises(
        KeyError, match=f"block {mine[1]} has {holders} holders; {holders + 1} cannot leave it"
    ):
        manager.free_blocks([mine[0]] + [mine[1]] * (holders + 1))
    assert same_books(before, books(manager))
    manager.free_blocks(mine * holders)
    manager.check_integrity()
    assert manager.num_free_blocks() == POOL


def test_info_of_a_free_block_is_an_error():
    with pytest.raises(KeyError):
        make_manager().info(0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert blocks_for(tokens, 4) == blocks
