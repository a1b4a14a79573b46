"""The router: every request on one replica at a time, work shared evenly, prefixes kept together."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from rosellm.cluster.known_prefixes import KnownPrefixes, marks
from rosellm.cluster.router import MUCH_BUSIER, Routed, Router

WINDOW, BLOCK, BLOCKS = 4, 4, 6
SHARED = list(range(12))


class RouterProgram(RuleBasedStateMachine):
    """Random arrivals, progress, ends and deaths, beside a model of who has what."""

    replicas = Bundle("replicas")
    prefixes = False

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WINDOW, BLOCKS if self.prefixes else 0)
        self.sizes: dict[int, tuple[int, int]] = {}  # request → prompt, new tokens
        self.made: dict[int, int] = {}  # running request → tokens generated, -1 before the prompt is done
        self.runs_on: dict[int, int] = {}
        self.waiting: list[int] = []
        self.ended: list[int] = []
        self.live: set[int] = set()
        self.n_replicas = 0

    def left(self, request: int) -> int:
        n_prompt, n_new = self.sizes[request]
        made = self.made.get(request, -1)
        return n_prompt + n_new if made < 0 else n_new - made

    def load(self, replica: int) -> int:
        return sum(self.left(request) for request, place in self.runs_on.items() if place == replica)

    def count(self, replica: int) -> int:
        return list(self.runs_on.values()).count(replica)

    @rule(target=replicas)
    def start(self):
        if len(self.live) == 3:
            return multiple()
        self.n_replicas += 1
        self.router.add(self.n_replicas)
        self.live.add(self.n_replicas)
        return self.n_replicas

    @rule(replica=consumes(replicas))
    def die(self, replica: int):
        lost = [request for request, place in self.runs_on.items() if place == replica]
        assert sorted(self.router.lose(replica)) == sorted(lost)
        self.live.remove(replica)
        for request in lost:
            del self.runs_on[request]
            self.made.pop(request, None)
        self.waiting = lost + self.waiting

    @rule(n_shared=st.integers(0, 12), n_own=st.integers(1, 9), n_new=st.integers(1, 30))
    def submit(self, n_shared: int, n_own: int, n_new: int):
        request = len(self.sizes)
        prompt = SHARED[:n_shared] + [100 + request] * n_own
        self.sizes[request] = len(prompt), n_new
        of = marks(prompt, BLOCK) if self.prefixes else ()
        self.router.submit(Routed(request, len(prompt), n_new, of))
        self.waiting.append(request)

    @rule()
    def assign(self):
        for replica, request in self.router.assign():
            assert request == self.waiting.pop(0)
            assert replica in self.live and self.count(replica) < WINDOW
            free = [self.load(one) for one in self.live if self.count(one) < WINDOW]
            limit = max(MUCH_BUSIER * min(free), min(free) + self.left(request))
            assert self.load(replica) <= (limit if self.prefixes else min(free))
            self.runs_on[request] = replica
        assert not self.waiting or all(self.count(replica) == WINDOW for replica in self.live)

    @rule(data=st.data())
    def advance(self, data):
        if self.runs_on:
            request = data.draw(st.sampled_from(sorted(self.runs_on)))
            self.made[request] = data.draw(
                st.integers(max(self.made.get(request, 0), 0), self.sizes[request][1])
            )
            self.router.note(request, self.made[request])

    @rule(data=st.data())
    def finish(self, data):
        if self.runs_on:
            request = data.draw(st.sampled_from(sorted(self.runs_on)))
            self.router.finish(request)
            del self.runs_on[request]
            self.ended.append(request)

    @invariant()
    def every_request_is_in_one_place(self):
        placed = [request for replica in self.live for request in self.router.running(replica)]
        assert sorted(placed) == sorted(self.runs_on)
        assert sorted(placed + self.waiting + self.ended) == list(range(len(self.sizes)))
        assert self.router.has_unfinished == bool(placed or self.waiting)

    @invariant()
    def the_load_is_that_of_the_requests(self):
        assert sorted(self.router.live) == sorted(self.live)
        assert {r: self.router.outstanding(r) for r in self.live} == {r: self.load(r) for r in self.live}

    def teardown(self):
        """What is left ends, once, on a last replica."""
        for replica in list(self.live):
            self.die(replica)
        self.start()
        while self.waiting:
            self.assign()
            for request in list(self.runs_on):
                self.router.finish(request)
                del self.runs_on[request]
                self.ended.append(request)
        assert sorted(self.ended) == list(range(len(self.sizes))) and not self.router.has_unfinished


class PrefixRouterProgram(RouterProgram):
    prefixes = True


programs = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True, database=None)


def test_no_request_is_lost_or_given_twice_and_the_least_busy_replica_gets_the_next():
    run_state_machine_as_test(RouterProgram, settings=programs)


def test_with_prefixes_too_and_none_goes_to_a_much_busier_replica():
    run_state_machine_as_test(PrefixRouterProgram, settings=programs)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 5))
def test_requests_that_are_all_known_at_once_differ_by_at_most_one_between_replicas(sizes, n_replicas):
    router = Router(window=len(sizes))
    for replica in range(n_replicas):
        router.add(replica)
    for request, n_new in enumerate(sizes):
        router.submit(Routed(request, 1, n_new))
    assert len(router.assign()) == len(sizes)
    loads = [router.outstanding(replica) for replica in range(n_replicas)]
    assert max(loads) - min(loads) <= max(sizes) + 1


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
    assert not router.has_unfinished and router.outstanding(0) == router.outstanding(1) == 0
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
def test_known_prefixes_hold_so_many_and_tell_no_more_than_was_given(prompts, asked, most):
    known = KnownPrefixes(most)
    for prompt in prompts:
        known.add(marks(prompt, 2))
        assert known.length(marks(prompt, 2)) == min(len(prompt) // 2, most)
    assert len(known) <= most
    every = KnownPrefixes(1000)
    for prompt in prompts:
        every.add(marks(prompt, 2))
    assert known.length(marks(asked, 2)) <= every.length(marks(asked, 2))
