"""Bad words of several tokens: which tokens a step bars; and what drafts count."""

from __future__ import annotations

import random
from copy import copy
from types import SimpleNamespace

import pytest
import torch

from rosellm.roseinfer.cache.device_state import (
    COUNTS,
    FIELDS,
    INERT,
    POSITION,
    TOKEN,
    DeviceState,
    row_bytes,
)
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.cache.token_counts import BARRED, WORD_COLUMNS, TokenCounts, dense_entries
from rosellm.roseinfer.kernels.speculation import draft_kernels
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.worker import Worker
from tests.roseinfer.kernels.kernel_checks import every_twin

ROWS, VOCAB, STOP, START, END = 5, 6, 5, 3, 11


def make_sequence(rng: random.Random, least: tuple[int, ...] = (0, 3)) -> Sequence:
    """A sequence of few distinct tokens, whose bad words overlap, share ends, and begin in its prompt too."""
    allowed = rng.choice([None, [1, 2, 3, STOP]])
    params = SamplingParams(allowed_token_ids=allowed, min_tokens=rng.choice(least), bad_words=["any"])
    sequence = Sequence(0, rng.choices([1, 2], k=rng.randint(1, 1 + START)), params, (STOP,))
    sequence.tokens += rng.choices([1, 2, 3], weights=[3, 3, 1], k=1 + END - sequence.n_prompt)
    lengths = [rng.randint(1, 5) for _ in range(rng.choice([0, 9]))]
    sequence.bad_words = [rng.choices([1, 2], k=n - 1) + rng.choices([1, 3, STOP]) for n in lengths]
    return sequence


def counts_in(table: torch.Tensor) -> TokenCounts:
    worker = SimpleNamespace(counts=table, _staging=StagingBuffer(table.device, torch.int32))
    return TokenCounts(ROWS, lambda _, *words: Worker.write_counts(worker, *words))


@every_twin
@pytest.mark.parametrize("seed", range(3))
def test_each_step_bars_the_ends_of_bad_words_as_the_dense_entries_say(kernels, device, seed):
    """Rows are taken, taken anew and given up at any position; what they held before does not matter."""
    rng, state = random.Random(seed), DeviceState(ROWS, 2, torch.device(device))
    table = torch.randint(-9, 9, (ROWS, VOCAB + WORD_COLUMNS), dtype=torch.int32, device=device)
    counts = counts_in(table)
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


@every_twin
@pytest.mark.parametrize(("seed", "k"), [(0, 3), (1, 1), (2, 4)])
def test_drafts_count_as_tokens_of_single_steps_and_refused_ones_leave_no_trace(kernels, device, seed, k):
    """Neither in the table row of a draft, nor in that of its sequence at the next step."""
    rng, drafting = random.Random(seed), draft_kernels(kernels.name, dependent=False)
    state, wide = (DeviceState(n, 2, torch.device(device)) for n in (ROWS, ROWS * (k + 1)))
    size = ROWS * (k + 2), VOCAB + WORD_COLUMNS
    table = torch.randint(-9, 9, size, dtype=torch.int32, device=device)
    sequences, at = [make_sequence(rng, (0,)) for _ in range(ROWS)], [START] * ROWS
    held, n_refused = counts_in(table).hold(sequences, at), 0
    while max(at) >= 0:
        wide.rows[:, POSITION], wide.rows[:, COUNTS] = INERT, 0
        expected, n_new = {}, [1] * ROWS
        for row, (sequence, position) in enumerate(zip(sequences, at, strict=True)):
            if position < 0:
                continue
            fields = bytearray(row_bytes(sequence, position, 0, held[row]))
            state.rows[row, :FIELDS] = torch.frombuffer(fields, dtype=torch.int32)
            following = sequence.tokens[position + 1 : END][: rng.randint(0, k)]
            drafts = [token if rng.random() < 0.7 else rng.choice([1, 2, 3]) for token in following]
            while n_new[row] <= len(drafts) and drafts[: n_new[row]] == following[: n_new[row]]:
                n_new[row] += 1
            n_refused += len(drafts) + 1 - n_new[row]
            for i, token in enumerate([sequence.tokens[position], *drafts]):
                verified, so_far = row * (k + 1) + i, copy(sequence)
                wide.rows[verified] = state.rows[row]
                wide.rows[verified, TOKEN], wide.rows[verified, POSITION] = token, position + i
                wide.rows[verified, COUNTS] = 1 + ROWS + verified if i else held[row]
                so_far.tokens = sequence.tokens[: position + 1] + drafts[:i]
                expected[verified] = dense_entries(so_far, VOCAB).tolist()
        drafting.fork_counts(state=state, wide=wide, table=table)
        kernels.count_tokens(state=wide, table=table)
        for verified, entries in expected.items():
            assert table[wide.counts[verified] - 1, :VOCAB].tolist() == entries
        at = [p + n if 0 <= p < END else INERT for p, n in zip(at, n_new, strict=True)]
        state.positions.copy_(torch.tensor(at))
        drafting.count_accepted(state=state, wide=wide, table=table)
    assert n_refused
