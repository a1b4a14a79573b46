"""Bad words of several tokens: which tokens a step bars."""

from __future__ import annotations

import random
from copy import copy
from types import SimpleNamespace

import pytest
import torch

from rosellm.roseinfer.cache.device_state import FIELDS, DeviceState, row_bytes
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.cache.token_counts import BARRED, WORD_COLUMNS, TokenCounts, dense_entries
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.worker import Worker
from tests.roseinfer.kernels.kernel_checks import every_twin

ROWS, VOCAB, STOP, START, END = 5, 6, 5, 3, 11


def make_sequence(rng: random.Random) -> Sequence:
    """A sequence of few distinct tokens, whose bad words overlap, share ends, and begin in its prompt too."""
    allowed = rng.choice([None, [1, 2, 3, STOP]])
    params = SamplingParams(allowed_token_ids=allowed, min_tokens=rng.choice([0, 3]), bad_words=["any"])
    sequence = Sequence(0, rng.choices([1, 2], k=rng.randint(1, 1 + START)), params, (STOP,))
    sequence.tokens += rng.choices([1, 2, 3], weights=[3, 3, 1], k=1 + END - sequence.n_prompt)
    lengths = [rng.randint(1, 5) for _ in range(rng.choice([0, 9]))]
    sequence.bad_words = [rng.choices([1, 2], k=n - 1) + rng.choices([1, 3, STOP]) for n in lengths]
    return sequence


@every_twin
@pytest.mark.parametrize("seed", range(3))
def test_each_step_bars_the_ends_of_bad_words_as_the_dense_entries_say(kernels, device, seed):
    """Rows are taken, taken anew and given up at any position; what they held before does not matter."""
    rng, state = random.Random(seed), DeviceState(ROWS, 2, torch.device(device))
    table = torch.randint(-9, 9, (ROWS, VOCAB + WORD_COLUMNS), dtype=torch.int32, device=device)
    worker = SimpleNamespace(counts=table, _staging=StagingBuffer(table.device, torch.int32))
    counts = TokenCounts(ROWS, lambda _, *words: Worker.write_counts(worker, *words))
    held: dict[Sequence, int] = {}
    n_barred = 0
    for position in [*range(START, END)] * 3:
        for sequence in [s for s in held if position == START or rng.random() < 0.3]:
            counts.drop(sequence)
            del held[sequence]
        joining = [s for s in held if rng.random() < 0.2]
        joining += [make_sequence(rng) for _ in range(ROWS - len(held))]
        held.update(zip(joining, counts.hold(joining, [position] * len(joining)), strict=True))
        counts.allow_stops(dict.fromkeys(held, position).__getitem__)
        fields = b"".join(row_bytes(sequence, position, 0, place) for sequence, place in held.items())
        state.rows[:, :FIELDS] = torch.frombuffer(bytearray(fields), dtype=torch.int32).view(ROWS, FIELDS)
        kernels.count_tokens(state=state, table=table)
        for sequence, place in held.items():
            so_far = copy(sequence)
            so_far.tokens = sequence.tokens[: position + 1]
            found = table[place - 1, :VOCAB]
            assert found.tolist() == dense_entries(so_far, VOCAB).tolist()
            n_barred += int((found & BARRED).count_nonzero())
    assert n_barred > 20
