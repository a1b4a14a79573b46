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


def make_sequence(rng: random.Random, stop: int) -> Sequence:
    """Of few tokens, so that beginnings of its bad words overlap, share ends, and occur in prompt and output."""
    allowed = [1, 2, 3, stop] if rng.random() < 0.5 else None
    params = SamplingParams(max_tokens=9, allowed_token_ids=allowed, min_tokens=rng.choice([0, 3]))
    sequence = Sequence(0, rng.choices([1, 2], k=rng.randint(1, 4)), params, (stop,))
    sequence.tokens += rng.choices([1, 2, 3], weights=[3, 3, 1], k=12 - sequence.n_prompt)
    lengths = [rng.randint(1, 5) for _ in range(rng.choice([0, 9]))]
    sequence.bad_words = [rng.choices([1, 2], k=n - 1) + rng.choices([1, 3, stop]) for n in lengths]
    return sequence


@every_twin
@pytest.mark.parametrize("seed", range(3))
def test_each_step_bars_the_ends_of_bad_words_as_the_dense_entries_say(kernels, device, seed):
    """Rows are taken and given up at any position; what they held before does not matter."""
    rng, rows, vocab, stop = random.Random(seed), 5, 6, 5
    table = torch.randint(-9, 9, (rows, vocab + WORD_COLUMNS), dtype=torch.int32, device=device)
    state, barred = DeviceState(rows, 2, torch.device(device)), 0
    worker = SimpleNamespace(counts=table, _staging=StagingBuffer(table.device, torch.int32))
    counts = TokenCounts(rows, lambda _, *words: Worker.write_counts(worker, *words))
    held: list[Sequence] = []
    for position in [3, 4, 5, 6, 7, 8, 9, 10] * 3:
        leaving = [s for s in held if rng.random() < 0.3 or position == 3]
        for sequence in leaving:
            counts.drop(sequence)
        held = [s for s in held if s not in leaving]
        joining = [
            s for s in (make_sequence(rng, stop) for _ in range(rows - len(held))) if s.params.is_biased
        ]
        again = [s for s in held if rng.random() < 0.2]
        counts.hold(joining + again, [position] * len(joining + again))
        held += joining
        counts.allow_stops(lambda _: position)
        state.counts.zero_()
        for row, sequence in enumerate(held):
            fields = row_bytes(sequence, position, 0, 1 + counts._place_of[sequence])
            state.rows[row, :FIELDS] = torch.frombuffer(bytearray(fields), dtype=torch.int32)
        kernels.count_tokens(state=state, table=table)
        for row, sequence in enumerate(held):
            so_far = copy(sequence)
            so_far.tokens = sequence.tokens[: max(position + 1, sequence.n_prompt)]
            found = table[state.counts[row] - 1, :vocab]
            assert found.tolist() == dense_entries(so_far, vocab).tolist()
            barred += int((found & BARRED).count_nonzero())
    assert barred > 9
