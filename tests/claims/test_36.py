"""Notebook 36's figures are those of the recorded replicas and of its counted steps."""

from __future__ import annotations

from rosellm.cluster import router
from rosellm.lab.records import two_gpus
from rosellm.lab.records.records import find
from tests.claims.prose import claim, prose

TEXT = prose("36")


def test_two_replicas_serve_as_much_as_recorded():
    ((sides,),) = (runs.values() for runs in two_gpus.recorded_runs(find(), kind="replicas").values())
    speeds = two_gpus.speeds(sides)
    words = r"Two replicas serve ([\d.]+) times as many tokens of W8"
    claim(TEXT, words, speeds["2"] / speeds["1"])


def test_counting_tokens_loses_to_round_robin_with_as_many_slots_as_said():
    new = [400 if i % 2 else 20 for i in range(64)]
    own = router.Router(window=10**9, known_blocks=10**6)
    for replica in range(2):
        own.add(replica)
    for i, length in enumerate(new):
        own.submit(router.Routed(i, 1, length))
    given = own.assign()
    counted = [[new[i] for replica, i in given if replica == one] for one in range(2)]

    def steps(parts: list[list[int]]) -> int:
        ends = []
        for part in parts:
            slots = [0] * 32
            for length in part:
                slots.sort()
                slots[0] += length
            ends.append(max(slots))
        return max(ends)

    words = r"at 32 slots it takes (\d+) steps against (\d+) of round robin"
    claim(TEXT, words, steps(counted), steps([new[::2], new[1::2]]))
    assert max(map(len, counted)) > 32
