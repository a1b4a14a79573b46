"""Drafts from a row's own text, and which choices of the model count: spec, kernels and a plain oracle."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import (
    COUNTS,
    FIELDS,
    INERT,
    LIMIT,
    POSITION,
    ROUND,
    STOP,
    TEMPERATURE,
    TOKEN,
    DeviceState,
)
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.draw import draw
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.kernels.prefill_tiles import COLUMNS
from rosellm.roseinfer.kernels.speculation import (
    CHUNK,
    LONGEST,
    SHORTEST,
    DraftKernels,
    Texts,
    Verified,
    draft_kernels,
    drafts_after,
)
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.sampling import NOT_FINITE
from tests.roseinfer.kernels.kernel_checks import every_twin

WIDTH, LENGTH, STOPS = 7, CHUNK + 200, (3, 5)
COPIES = 40  # rows of the table of counts before those of verify rows


def drafted(text: list[int], most: int) -> list[int]:
    """The tokens after the latest occurrence of the longest suffix, repeated if the text ends too soon."""
    for n in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[-n:]:
                following = text[end + 1 :]
                return [following[i % len(following)] for i in range(most)]
    return []


def random_text(rng: random.Random, n: int) -> list[int]:
    """Of few tokens, or of words that come again, so that suffixes of any length occur."""
    words = [[rng.randrange(9) for _ in range(rng.randint(1, 12))] for _ in range(4)]
    text: list[int] = []
    while len(text) < n:
        text += rng.choice(words) if rng.random() < 0.7 else [rng.randrange(rng.choice((2, 50)))]
    return text[:n]


class Rows:
    """Random rows of a step with k drafts: some inert, some near their limit, some that get no drafts."""

    def __init__(self, seed: int, n_rows: int, k: int, device: str, pieces: int | None = 2) -> None:
        rng = self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.k, self.texts_of = k, [random_text(rng, rng.randint(1, LENGTH - 20)) for _ in range(n_rows)]
        self.state = DeviceState(n_rows, WIDTH, torch.device(device), STOPS, 1 + k)
        rows = torch.randint(1, 1000, self.state.rows.shape, dtype=torch.int32)
        tokens = torch.full((n_rows, LENGTH), -7, dtype=torch.int32)
        self.inert = [rng.random() < 0.2 for _ in range(n_rows)]
        self.wants_drafts = torch.tensor([rng.random() < 0.8 for _ in range(n_rows)], dtype=torch.int32)
        for row, text in enumerate(self.texts_of):
            tokens[row, : len(text) - 1] = torch.tensor(text[:-1])
            rows[row, TOKEN], rows[row, POSITION] = text[-1], INERT if self.inert[row] else len(text) - 1
            rows[row, LIMIT] = len(text) + rng.choice((1, 2, 3, k + 1, 99))
            rows[row, STOP], rows[row, ROUND] = rng.choice((-1, 3)), rng.randrange(64)
            rows[row, COUNTS] = row % 3
        self.state.rows.copy_(rows)
        self.n_cached = torch.zeros(n_rows, dtype=torch.int32)
        self.texts = Texts(*(x.to(device) for x in (tokens, self.wants_drafts, self.n_cached)))
        wide = DeviceState(n_rows * (k + 1), WIDTH, torch.device(device), STOPS)
        wide.rows.fill_(-99)
        columns = None
        if pieces is not None:
            columns = torch.full((COLUMNS, n_rows * pieces), -99, dtype=torch.int32, device=device)
        self.verified = Verified(wide, columns, k, pieces or 1, COPIES)

    def drafts(self, row: int) -> list[int]:
        text, limit = self.texts_of[row], int(self.state.limits[row])
        if self.inert[row] or not self.wants_drafts[row]:
            return []
        return drafted(text, self.k)[: max(limit - 2 - (len(text) - 1), 0)]


def drafting(kernels: Kernels) -> DraftKernels:
    return draft_kernels(kernels.name, dependent=False)


SIZES = [(0, 1, 7), (1, 9, 7), (2, 5, 16), (3, 6, 1), (4, 33, 3)]


def test_the_longest_suffix_that_occurs_again_is_continued_from_its_latest_place():
    for text, most, expected in (
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, [9, 1]),  # two places: the later
        ([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], 2, [8, 1]),  # the longer suffix is earlier
        ([7, 7, 7], 4, [7, 7, 7, 7]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # what follows ends with the text, and repeats
        ([4, 1, 5, 1], 3, []),  # one token is not enough
        ([6], 3, []),
    ):
        assert drafts_after(torch.tensor(text), most).tolist() == expected == drafted(text, most)


@every_twin
def test_a_prefill_writes_its_prompts_to_the_texts_of_their_rows(kernels: Kernels, device):
    prompts = [torch.randint(0, 99, (n,), dtype=torch.int32) for n in (1, CHUNK + 7, CHUNK, 33)]
    starts, slots = (0, 5, 0, 0), (2, 0, 4, 3)  # of the second prompt, five tokens were cached before
    new = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    last = torch.tensor([len(tokens) for tokens in new]).cumsum(0) - 1
    state = DeviceState(6, WIDTH, torch.device(device), STOPS)
    state.rows.fill_(INERT)
    state.positions[:4] = torch.tensor([len(prompt) - 1 for prompt in prompts])
    shapes = (5, LENGTH), (5,), (5,)
    texts = Texts(*(torch.full(shape, -7, dtype=torch.int32, device=device) for shape in shapes))
    places, ends = torch.tensor([*slots, 5, 5]), torch.tensor([*last, 0, 0])  # row 5 is spare and has no text
    ids = torch.cat((*new, torch.zeros(9, dtype=torch.int32)))
    given = {"slots": places.to(device), "last": ends.to(device), "ids": ids.to(device)}
    drafting(kernels).write_prompts(state=state, texts=texts, **given)
    for prompt, start, slot in zip(prompts, starts, slots, strict=True):
        assert texts.tokens[slot, start : len(prompt)].tolist() == prompt[start:].tolist()
        assert (texts.tokens[slot, len(prompt) :] == -7).all()
        assert (texts.wants_drafts[slot], texts.n_cached[slot]) == (1, len(prompt))
    assert (texts.tokens[1] == -7).all() and texts.wants_drafts[1] == -7 == texts.n_cached[1]


@every_twin
@pytest.mark.parametrize(("seed", "n_rows", "k"), SIZES)
@pytest.mark.parametrize("pieces", [None, 1, 3])
def test_each_row_is_verified_with_its_drafts(kernels: Kernels, device, seed, n_rows, k, pieces):
    made = Rows(seed, n_rows, k, device, pieces)
    state, before = made.state, made.state.rows.clone()
    counted = (state.counts > 0).tolist()
    drafting(kernels).propose(state=state, texts=made.texts, verified=made.verified)
    assert torch.equal(state.rows, before)
    n_words = FIELDS if pieces else state.rows.shape[1]
    n_drafted = 0
    for row, text in enumerate(made.texts_of):
        drafts = made.drafts(row)
        n_drafted += len(drafts)
        wide = made.verified.state.rows[row * (k + 1) : (row + 1) * (k + 1)]
        for i in range(k + 1):
            there = not made.inert[row] and i <= len(drafts)
            expected = before[row, :n_words].clone()
            expected[POSITION] = len(text) - 1 + i if there else INERT
            expected[TEMPERATURE] *= there or (i == 0 and kernels.name == "torch")
            if i:
                own_row = 1 + COPIES + row * (k + 1) + i
                expected[COUNTS] = own_row if there and counted[row] else 0
            if there and i:
                expected[TOKEN] = drafts[i - 1]
            found = wide[i, :n_words].clone()
            if not there:
                found[TOKEN] = expected[TOKEN]  # never read
                found[TEMPERATURE], expected[TEMPERATURE] = 0, 0
            assert torch.equal(found, expected)
            assert (wide[i, n_words:] == -99).all()
        if not made.inert[row]:
            assert made.texts.tokens[row, : len(text)].tolist() == text
        if pieces:
            start = 0 if made.inert[row] else len(text) - 1
            own = 0 if made.inert[row] else 1 + len(drafts)
            for piece in range(pieces):
                column = made.verified.columns[:, row * pieces + piece].tolist()
                first = row * (k + 1)
                assert column == [first, own, start, first, start, row, piece, pieces]
    assert n_drafted or n_rows == 1


def chosen_tokens(made: Rows, row: int) -> list[int]:
    """The drafts, up to a place from which the model chooses others; some stop the row, one is no token."""
    drafts, rng = made.drafts(row), made.rng
    right = rng.randint(0, len(drafts))
    tokens = drafts[:right] + [rng.choice((60, 61, *STOPS, NOT_FINITE)) for _ in range(made.k + 1 - right)]
    return tokens


def accepted(made: Rows, row: int, chosen: list[int]) -> list[int]:
    """One token after another, as single steps would choose them, for as long as drafts foresaw them."""
    text, state = list(made.texts_of[row]), made.state
    stop, limit, out = int(state.stops[row]), int(state.limits[row]), []
    for draft, token in zip([*made.drafts(row), None], chosen, strict=False):
        out.append(token)
        text.append(token)
        ends = token < 0 or token == stop or (stop >= 0 and token in STOPS) or len(text) >= limit
        if ends or token != draft:
            break
    return out


@every_twin
@pytest.mark.parametrize("as_tiles", [False, True])
@pytest.mark.parametrize(("seed", "n_rows", "k"), SIZES)
def test_a_row_advances_by_the_tokens_that_single_steps_would_give_it(
    kernels: Kernels, device, seed, n_rows, k, as_tiles
):
    made = Rows(seed, n_rows, k, device)
    state = made.state
    drafting(kernels).propose(state=state, texts=made.texts, verified=made.verified)
    chosen = [chosen_tokens(made, row) for row in range(n_rows)]
    expected = [accepted(made, row, tokens) for row, tokens in enumerate(chosen)]
    ends = [
        tokens[-1] < 0
        or tokens[-1] == int(state.stops[row])
        or (int(state.stops[row]) >= 0 and tokens[-1] in STOPS)
        or len(made.texts_of[row]) + len(tokens) >= int(state.limits[row])
        for row, tokens in enumerate(expected)
    ]
    before, values, indices = state.rows.clone(), *choices(chosen, device, as_tiles)
    state.planes.fill_(-99)
    drafting(kernels).accept(
        state=state, texts=made.texts, verified=made.verified, values=values, indices=indices
    )
    if device == "cuda":
        torch.cuda.synchronize()
    for row, tokens in enumerate(expected):
        at = int(before[row, ROUND])
        assert int(state.rounds[row]) == (at + 1) % 64
        found, others = state.planes[:, at, row].tolist(), state.planes[:, :, row].clone()
        others[:, at] = -99
        assert (others == -99).all()
        if made.inert[row]:
            assert found == [INERT] * (k + 1) and int(state.positions[row]) == INERT
            continue
        assert found == tokens[::-1] + [INERT] * (k + 1 - len(tokens))
        text = made.texts_of[row]
        assert int(state.positions[row]) == (INERT if ends[row] else len(text) - 1 + len(tokens))
        assert int(state.tokens[row]) == (tokens[-1] if tokens[-1] >= 0 else text[-1])
        kept = [token for token in tokens if token >= 0]
        assert made.texts.tokens[row, : len(text) + len(kept)].tolist() == text + kept
    assert max(map(len, expected)) > 1 or k * n_rows < 8


def choices(chosen: list[list[int]], device: str, as_tiles: bool) -> tuple[Tensor | None, Tensor]:
    """The arguments ``values`` and ``indices`` by which these tokens are chosen."""
    tokens = torch.tensor(chosen, dtype=torch.int32).view(-1, 1)
    if not as_tiles:
        return None, tokens.to(device)
    values = torch.rand(len(tokens), 5)
    indices = torch.randint(0, 50, (len(tokens), 5), dtype=torch.int32)
    best = torch.randint(0, 5, (len(tokens),))
    rows = torch.arange(len(tokens))
    is_token = tokens[:, 0] >= 0
    values[rows, best] = torch.where(is_token, 2.0, float("inf"))
    indices[rows, best] = torch.where(is_token, tokens[:, 0], 1)
    return values.to(device), indices.to(device)


@every_twin
def test_a_plain_steps_last_and_new_token_join_the_text(kernels: Kernels, device):
    made = Rows(5, 40, 2, device)
    texts, slots = made.texts.tokens, torch.arange(len(made.state.rows), device=device)
    before, chosen = texts.clone(), (7 + slots[:, None]).int()
    kernels.advance(state=made.state, slots=slots, values=None, indices=chosen, texts=texts)
    for row, text in enumerate(made.texts_of):
        if made.inert[row]:
            assert torch.equal(texts[row], before[row])
        else:
            assert texts[row, : len(text) + 1].tolist() == [*text, 7 + row]
            assert torch.equal(texts[row, len(text) + 1 :], before[row, len(text) + 1 :])


N_DRAWS, LOGITS = 20_000, torch.linspace(-1.5, 1.5, 8)


def drawn(positions_of: str) -> tuple[Tensor, Tensor]:
    """First tokens, and second tokens after a right draft, of rows that differ in their seeds.

    positions_of: "verify rows", or "state rows" for the mistake of one position for all verify rows of a row.
    """
    state = DeviceState(N_DRAWS, 1, torch.device("cpu"), (), 2)
    state.tokens.fill_(4)
    state.positions.fill_(4)
    state.limits.fill_(99)
    state.temperatures.fill_(1.0)
    state.seeds.copy_(torch.arange(N_DRAWS))
    tokens = torch.tensor([[3, 4, 5, 3, 0, 0, 0, 0]], dtype=torch.int32).repeat(N_DRAWS, 1)  # 3 4 5 3 4: 5
    texts = Texts(tokens, *torch.ones(2, N_DRAWS, dtype=torch.int32))
    verified = Verified(DeviceState(2 * N_DRAWS, 1, torch.device("cpu")), None, 1)
    torch_kernels = draft_kernels("torch", dependent=False)
    torch_kernels.propose(state=state, texts=texts, verified=verified)
    wide = verified.state
    positions = wide.positions
    if positions_of == "state rows":
        positions = state.positions.repeat_interleave(2)
    settings = wide.temperatures, wide.top_k, wide.top_p, wide.min_p, wide.seeds, positions + 1
    chosen = draw(LOGITS.repeat(2 * N_DRAWS, 1), *settings, gumbel_noise, filtered=False)
    torch_kernels.accept(
        state=state, texts=texts, verified=verified, values=None, indices=chosen[:, None].int()
    )
    last, before = state.planes[:, 0]
    return torch.where(before >= 0, before, last), last[before >= 0]


def test_draws_at_every_position_follow_the_models_probabilities_and_one_position_for_all_does_not():
    """A draft is right in about one of seven rows; equal noise at both positions would repeat it."""
    fit, probs = load_exhibit("chi_squared").fit, LOGITS.softmax(dim=0)
    first, second = drawn("verify rows")
    assert len(second) > 2000 and int((first == 5).sum()) == len(second)
    assert fit(first, probs).chance > 1e-3 and fit(second, probs).chance > 1e-3
    first, second = drawn("state rows")
    assert fit(first, probs).chance > 1e-3 and fit(second, probs).chance < 1e-9
