"""The router: every request on one replica at a time, work shared evenly, prefixes kept together."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.cluster.known_prefixes import KnownPrefixes, marks
from rosellm.cluster.router import MUCH_BUSIER, Routed, Router

WINDOW, BLOCK, BLOCKS = 4, 4, 6


class Model:
    """The router, beside a plain account of who has what, through which random events are checked."""

    def __init__(self, chance: Random, prefixes: bool) -> None:
        self.chance, self.prefixes = chance, prefixes
        self.router = Router(WINDOW, BLOCKS if prefixes else 0)
        self.left: list[int] = []  # of every request, tokens to process
        self.sizes: list[tuple[int, int]] = []  # prompt, new tokens
        self.runs_on: dict[int, int] = {}
        self.waiting: list[int] = []
        self.live: set[int] = set()
        self.n_ended = 0

    def load(self, replica: int) -> int:
        return sum(self.left[request] for request, place in self.runs_on.items() if place == replica)

    def with_room(self) -> list[int]:
        return [one for one in self.live if list(self.runs_on.values()).count(one) < WINDOW]

    def start(self) -> None:
        replica = self.chance.randrange(3)
        if replica not in self.live:
            self.router.add(replica)
            self.live.add(replica)

    def die(self) -> None:
        if self.live:
            replica = self.chance.choice(sorted(self.live))
            lost = [request for request, place in self.runs_on.items() if place == replica]
            assert self.router.lose(replica) == lost
            self.live.remove(replica)
            for request in lost:
                del self.runs_on[request]
                self.left[request] = sum(self.sizes[request])
            self.waiting = lost + self.waiting

    def submit(self) -> None:
        request, n_new = len(self.sizes), self.chance.randint(1, 30)
        prompt = [0] * self.chance.randint(0, 12) + [request] * self.chance.randint(1, 9)
        self.sizes.append((len(prompt), n_new))
        self.left.append(len(prompt) + n_new)
        self.router.submit(Routed(request, len(prompt), n_new, marks(prompt, BLOCK) if self.prefixes else ()))
        self.waiting.append(request)

    def assign(self) -> None:
        for replica, request in self.router.assign():
            assert request == self.waiting.pop(0) and replica in self.with_room()
            least = min(map(self.load, self.with_room()))
            limit = max(MUCH_BUSIER * least, least + self.left[request]) if self.prefixes else least
            assert self.load(replica) <= limit
            self.runs_on[request] = replica
        assert not (self.waiting and self.with_room())

    def advance(self) -> None:
        if self.runs_on:
            request = self.chance.choice(list(self.runs_on))
            n_new = self.sizes[request][1]
            self.left[request] = self.chance.randint(0, min(n_new, self.left[request]))
            self.router.note(request, n_new - self.left[request])

    def finish(self) -> None:
        if self.runs_on:
            request = self.chance.choice(list(self.runs_on))
            self.router.finish(request)
            del self.runs_on[request]
            self.n_ended += 1

    def check(self) -> None:
        placed = [request for replica in self.live for request in self.router.running(replica)]
        assert sorted(placed) == sorted(self.runs_on)
        assert len(placed) + len(self.waiting) + self.n_ended == len(self.sizes)
        assert {one: self.router.outstanding(one) for one in self.router.live} == {
            one: self.load(one) for one in self.live
        }


@pytest.mark.parametrize("prefixes", [False, True])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_no_request_is_lost_or_given_twice_and_the_least_busy_replica_gets_the_next(prefixes, seed):
    model = Model(Random(seed), prefixes)
    events = [model.start, model.die, model.submit, model.assign, model.advance, model.finish]
    for event in model.chance.choices(events, weights=(2, 1, 4, 3, 3, 2), k=80):
        event()
        model.check()
    while model.runs_on or model.waiting:  # what is left ends, once
        model.start()
        model.assign()
        model.finish()
        model.check()


def with_two_replicas() -> Router:
    router = Router(window=100, known_blocks=100)
    router.add(0)
    router.add(1)
    return router


def submit(router: Router, request_id: int, prompt: list[int], n_new: int = 2) -> int:
    """Where the request goes."""
    router.submit(Routed(request_id, len(prompt), n_new, marks(prompt, BLOCK)))
    ((replica, _),) = router.assign()
    return replica


def test_a_request_goes_where_its_prefix_is_and_elsewhere_once_that_replica_is_much_busier():
    router = with_two_replicas()
    ours, theirs = [1] * 8, [2] * 8
    assert [submit(router, 0, ours), submit(router, 1, theirs)] == [0, 1]
    assert submit(router, 2, [*ours, 5]) == submit(router, 3, [*ours, 6]) == 0
    assert (router.outstanding(0), router.outstanding(1)) == (32, 10)
    assert submit(router, 4, [*ours, 7]) == 1  # 32 is more than twice 10, and than 10 + 11
    assert submit(router, 5, [*ours, 8]) == 1  # both have the prefix by now
    assert submit(router, 6, [3]) == 0


def test_a_lost_replica_s_prefixes_are_forgotten_and_its_requests_come_first():
    router = with_two_replicas()
    submit(router, 0, [1] * 8)
    submit(router, 1, [2] * 8)
    assert router.lose(0) == [0]
    router.submit(Routed(2, 3, 1))
    assert router.assign() == [(1, 0), (1, 2)]
    router.add(0)
    assert submit(router, 3, [1] * 8) == 0  # replica 1 knows it, but is much busier


def test_clearing_forgets_requests_but_not_prefixes():
    router = with_two_replicas()
    submit(router, 0, [9])
    submit(router, 1, [1] * 8)
    router.clear()
    assert router.running(1) == router.assign() == [] and router.outstanding(0) == router.outstanding(1) == 0
    assert submit(router, 2, [1] * 8) == 1


tokens = st.lists(st.integers(0, 2), max_size=20)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(tokens, tokens, st.integers(1, 5))
def test_marks_are_equal_as_far_as_whole_blocks_are(one, other, block_size):
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    common = min(len(one), len(other)) if common is None else common
    first, second = marks(one, block_size), marks(other, block_size)
    assert len(first) == len(one) // block_size
    equal = [a == b for a, b in zip(first, second, strict=False)]
    assert equal == [i < common // block_size for i in range(len(equal))]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(tokens, max_size=12), tokens, st.integers(1, 8))
def test_known_prefixes_hold_at_most_their_number_and_no_more_than_was_given(prompts, asked, most):
    known = KnownPrefixes(most)
    for prompt in prompts:
        known.add(marks(prompt, 2))
        assert known.length(marks(prompt, 2)) == min(len(prompt) // 2, most)
    assert len(known) <= most
    every = KnownPrefixes(1000)
    for prompt in prompts:
        every.add(marks(prompt, 2))
    assert known.length(marks(asked, 2)) <= every.length(marks(asked, 2))
