"""Draws from some tokens only: the kernels against the specification, and the distribution."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import INERT, DeviceState
from rosellm.roseinfer.kernels import filtered
from rosellm.roseinfer.kernels.advance import advance_ref
from rosellm.roseinfer.kernels.draw import allowed_log_probs, draw
from rosellm.roseinfer.kernels.filtered import Splits, choose_filtered, choose_filtered_ref, splits_for
from rosellm.roseinfer.kernels.filtered_head import Tiles, filtered_tiles, filtered_tiles_ref
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.kernels.penalties import count_tokens, count_tokens_ref
from rosellm.roseinfer.sampling import NOT_FINITE
from tests.helpers import TRITON_DEVICES
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    TOLERANCE,
    assert_near,
    assert_replays_equal_ordinary_launches,
    guarded_outputs,  # noqa: F401
)

guarded = pytest.mark.usefixtures("guarded_outputs")
LARGEST_SEED = 2**63 - 1
# temperature, top_k, top_p, min_p
RULES = [
    (1.0, 5, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.1),
    (0.8, 50, 0.9, 0.0),
    (1.0, 300, 0.5, 0.02),
    (2.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (5.0, 0, 0.99, 0.0),
    (1.0, 40, 0.95, 0.2),
    (1e-6, 20, 0.9, 0.0),
    (1e30, 30, 0.5, 0.0),
    (0.6, 2**31 - 1, 0.8, 0.0),
    (1.0, 0, 0.7, 0.3),
    (1.0, 0, 1.0, 1.0),
]
OTHERS = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.5)]  # not filtered


def make_state(rows: int, rules: list[tuple], device: str = "cpu", seed: int = 0) -> DeviceState:
    """A row for each of the rules, again and again, with seeds and positions of its own."""
    generator = torch.Generator().manual_seed(seed)
    state = DeviceState(rows, 3, torch.device(device))
    settings = torch.tensor((rules * rows)[:rows], dtype=torch.float64).T
    state.temperatures.copy_(settings[0])
    state.top_k.copy_(settings[1])
    state.top_p.copy_(settings[2])
    state.min_p.copy_(settings[3])
    state.seeds.copy_(torch.randint(LARGEST_SEED, (rows,), generator=generator))
    state.positions.copy_(torch.randint(1000, (rows,), generator=generator))
    state.limits.fill_(2**30)
    state.stops.fill_(INERT)
    return state


def tiles_of(logits: Tensor, state: DeviceState, width: int = 64) -> Tiles:
    """As the head would leave them."""
    rows, vocab = logits.shape
    n_tiles = -(-vocab // width)
    padded = torch.full((rows, n_tiles * width), -math.inf, device=logits.device)
    padded[:, :vocab] = torch.where(logits.isnan(), math.inf, logits.float())
    tiled = padded.view(rows, n_tiles, width)
    maxima = tiled.amax(dim=2)
    largest = torch.where(maxima.isfinite(), maxima, 0)[:, :, None]
    temperature = state.temperatures[:, None, None].clamp_min(1e-38)
    masses = ((tiled - largest) / temperature).exp().sum(dim=2)
    noise = gumbel_noise(state.seeds, state.positions + 1, n_tiles * width).view_as(tiled)
    amounts = torch.where(state.by_mass, state.temperatures, 0.0).clamp_max(1e30)[:, None, None]
    values, indices = torch.where(amounts > 0, tiled + amounts * noise, tiled).max(dim=2)
    indices += torch.arange(n_tiles, device=logits.device) * width
    arrived = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    return Tiles(values, indices.int(), maxima, masses, padded, arrived, width)


def tokens_of(tiles: Tiles, state: DeviceState) -> Tensor:
    """The token that each row takes, on the CPU."""
    rows, _ = tiles.values.shape
    after = DeviceState(rows, 3, torch.device("cpu"))
    after.rows.copy_(state.rows)
    advance_ref(state=after, slots=torch.arange(rows), values=tiles.values.cpu(), indices=tiles.indices.cpu())
    return after.ring[0]


def sure_rows(logits: Tensor, state: DeviceState) -> Tensor:
    """Rows whose token does not hang on the last bits of a sum, a quotient or the noise: ``[M]`` bool."""
    settings = state.temperatures, state.top_k
    noise = gumbel_noise(state.seeds, state.positions + 1, logits.shape[1])
    tokens = []
    for change in (1 - 1e-5, 1 + 1e-5):
        top_p = torch.where(state.top_p < 1, state.top_p * change, 1.0)
        allowed = allowed_log_probs(logits.float(), *settings, top_p, state.min_p * change).clamp_min(-1e30)
        scores = allowed + noise
        first, second = scores.topk(2).values.T
        tokens.append(torch.where(first - second > 1e-4, scores.argmax(dim=1), -1))
    only = (state.top_k == 1) | (state.min_p == 1)
    return only | ((tokens[0] == tokens[1]) & (tokens[0] >= 0))


def random_logits(rows: int, vocab: int, device: str = "cpu", seed: int = 0, size: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(rows, vocab, generator=generator)).to(device)


def assert_draws_as_specified(
    logits: Tensor, state: DeviceState, least_sure: float = 0.9, splits: Splits = splits_for
) -> None:
    found, expected = (tiles_of(logits, state) for _ in range(2))
    partial(choose_filtered, splits=splits)(tiles=found, state=state)
    choose_filtered_ref(tiles=expected, state=state)
    others = ~state.filtered
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(mine[others], theirs[others])
    sure = sure_rows(logits, state).cpu()
    assert sure.float().mean() >= least_sure
    assert torch.equal(tokens_of(found, state)[sure], tokens_of(expected, state)[sure])


# Choosing.


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("vocab", [7, 64, 501, 5003])
@pytest.mark.parametrize("size", [0.5, 3.0, 10.0])
def test_filtered_rows_draw_the_tokens_of_the_specification(size, vocab, device):
    rules = [*RULES, *OTHERS]
    state = make_state(len(rules), rules, device, seed=vocab)
    assert_draws_as_specified(random_logits(len(rules), vocab, device, int(size), size), state, 0.8)


@pytest.mark.slow
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_filtered_rows_draw_the_tokens_of_the_specification_from_real_vocabularies(vocab, device):
    rules = [(0.8, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (0.7, 3000, 0.8, 0.0), (1.0, 0, 1.0, 0.05)]
    state = make_state(len(rules), rules, device, seed=vocab)
    assert_draws_as_specified(random_logits(len(rules), vocab, device, 1), state, 0.5)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("n_high", [1, 10, 30])
def test_more_candidates_than_are_kept_may_lie_in_a_few_tiles(n_high, device):
    """The bound is then that of other tiles: up to 2,000 candidates are copied for 190 that are kept."""
    rules = [(2.0, 190, 0.9, 0.0), (2.0, 190, 1.0, 0.0), (2.0, 190, 0.8, 1e-3), (2.0, 0, 0.5, 0.0)]
    state = make_state(len(rules), rules, device, seed=n_high)
    logits = random_logits(len(rules), 50257, device, n_high, size=1.0)
    logits[:, 640 : 640 + 64 * n_high] += 9
    assert_draws_as_specified(logits, state, 0.7)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_of_equal_logits_the_first_are_kept(device):
    """Two values in turn: what is kept ends within the equals, by number, by mass, or by both."""
    rules = [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.1, 0.0), (1.0, 150, 0.5, 0.0), (1.0, 9, 0.5, 1.0)]
    rows = 40
    state = make_state(rows, rules, device)
    logits = (torch.arange(300) % 2).float().repeat(rows, 1).to(device)
    expected = tiles_of(logits, state)
    choose_filtered_ref(tiles=expected, state=state)
    found = tiles_of(logits, state)
    choose_filtered(tiles=found, state=state)
    tokens = tokens_of(found, state)
    assert set(tokens[0::4].tolist()) <= {1, 3, 5, 7, 9}
    assert tokens[1::4].max() < 2 * 0.1 * (150 + 150 / math.e) + 2 and tokens.remainder(2).all()
    assert tokens[2::4].max() <= 149 and tokens[3::4].max() <= 9
    assert torch.equal(tokens, tokens_of(expected, state))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_zeros_of_either_sign_are_equal(device):
    state = make_state(30, [(1.0, 3, 1.0, 0.0), (1.0, 3, 0.9, 0.0)], device)
    logits = torch.full((30, 200), -5.0, device=device)
    logits[:, [3, 50, 90, 170]] = torch.tensor([-0.0, 0.0, -0.0, 0.0], device=device)
    tiles = tiles_of(logits, state)
    choose_filtered(tiles=tiles, state=state)
    assert set(tokens_of(tiles, state).tolist()) == {3, 50, 90}


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_tokens_that_logits_rule_out_are_never_drawn(device):
    rules = [(1.0, 50, 1.0, 0.0), (1.0, 0, 0.999, 0.0), (1e30, 50, 0.9, 0.0), (3.0, 0, 1.0, 0.01)]
    state = make_state(32, rules, device)
    logits = torch.full((32, 300), -math.inf, device=device)
    logits[:, [100, 250]] = 1.0
    tiles = tiles_of(logits, state)
    choose_filtered(tiles=tiles, state=state)
    assert set(tokens_of(tiles, state).tolist()) == {100, 250}


@pytest.mark.parametrize("device", ["reference", *TRITON_DEVICES])
@pytest.mark.parametrize("rule", RULES[:5], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_probabilities_has_no_token_and_its_neighbours_have_theirs(bad, rule, device):
    choose = choose_filtered_ref if device == "reference" else choose_filtered
    device = "cpu" if device == "reference" else device
    state, logits = make_state(3, [rule], device), random_logits(3, 200, device)
    tiles = tiles_of(logits, state)
    choose(tiles=tiles, state=state)
    expected = tokens_of(tiles, state)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 130] = bad
    tiles = tiles_of(logits, state)
    choose(tiles=tiles, state=state)
    expected[1] = NOT_FINITE
    assert torch.equal(tokens_of(tiles, state), expected)


# Several programs a row, of rows with top-p alone.

BY_MASS = [(1.0, 0, p, 0.0) for p in (0.9, 0.5, 0.1, 0.01)] + [(0.7, 0, 0.8, 0.0), (1e30, 0, 0.3, 0.0)]


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Of four tiles."""
    monkeypatch.setattr(filtered, "Sizes", partial(filtered.Sizes, CHUNK=256))


def always(n: int) -> Splits:
    return lambda rows, n_chunks, device: n


def tokens_by(logits: Tensor, state: DeviceState, splits: int) -> Tensor:
    """The tokens drawn by so many programs a row."""
    tiles = tiles_of(logits, state)
    partial(choose_filtered, splits=always(splits))(tiles=tiles, state=state)
    return tokens_of(tiles, state)


@pytest.mark.slow
@guarded
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("size", [0.1, 2.0, 10.0])
def test_any_number_of_programs_draws_the_tokens_of_the_specification(size, splits, device):
    rules = [*BY_MASS, *RULES[:3], *OTHERS]
    state = make_state(2 * len(rules), rules, device, seed=splits)
    logits = random_logits(2 * len(rules), 2001, device, splits, size)
    logits[:, 300:700] = -math.inf
    assert_draws_as_specified(logits, state, 0.8, always(splits))


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("splits", [1, 7])
def test_of_equal_logits_in_any_chunk_the_first_are_kept_by_mass(splits, device):
    state = make_state(30, [(1.0, 0, 0.02, 0.0)], device)
    logits = (torch.arange(2000) % 2).float().repeat(30, 1).to(device)
    tokens = tokens_by(logits, state, splits)
    expected = tiles_of(logits, state)
    choose_filtered_ref(tiles=expected, state=state)
    assert torch.equal(tokens, tokens_of(expected, state)) and len(tokens.unique()) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_where_the_last_bit_of_a_sum_decides_all_numbers_of_programs_agree(device):
    """Of each seed, values of top-p next to each other around the share ahead of its draw."""
    n_seeds, n_near = 8, 16
    state = make_state(n_seeds * n_near, [(1.0, 0, 0.5, 0.0)], device)
    row, seeds = random_logits(1, 3001, device, 1, 1.0)[0], torch.arange(n_seeds, device=device)
    tokens = (row + gumbel_noise(seeds, torch.full_like(seeds, 6), len(row))).argmax(dim=1)
    shares = torch.where(row > row[tokens, None], row.double().softmax(0), 0).sum(dim=1).float()
    offsets = torch.arange(n_near, device=device, dtype=torch.int32) - n_near // 2
    near = (shares.view(torch.int32)[:, None] + offsets).view(torch.float32)
    state.seeds.copy_(seeds.repeat_interleave(n_near))
    state.positions.fill_(5)
    state.top_p.copy_(near.flatten())
    one, two, seven = (tokens_by(row.repeat(len(state.rows), 1), state, n) for n in (1, 2, 7))
    assert torch.equal(one, two) and torch.equal(one, seven)
    kept = one.view(n_seeds, n_near) == tokens[:, None].cpu()
    assert (kept.any(dim=1) & ~kept.all(dim=1)).sum() >= n_seeds // 2


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_rows_token_is_the_same_in_any_company(device):
    rules = [*BY_MASS, *RULES[:4], *OTHERS]
    rows = 2 * len(rules)
    state, logits = make_state(rows, rules, device), random_logits(rows, 2001, device)
    together, slots = tokens_by(logits, state, 1), torch.arange(rows, device=device)
    for row in range(rows):
        alone = tokens_by(logits[row : row + 1], state.at(slots[row : row + 1]), 7)
        assert alone.item() == together[row], row


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_probabilities_has_no_token_however_many_programs_it_has(bad, device):
    state, logits = make_state(5, BY_MASS[:2], device), random_logits(5, 1000, device)
    expected = tokens_by(logits, state, 3)
    logits[1, slice(None) if bad == -math.inf else slice(700, 703)] = bad
    expected[1] = NOT_FINITE
    assert torch.equal(tokens_by(logits, state, 3), expected)


@pytest.mark.parametrize("sms", [1, 20, 132])
def test_programs_fill_the_gpu_once_or_are_one_a_row(sms, monkeypatch):
    monkeypatch.setattr(filtered, "multiprocessors", lambda device: sms)
    for rows in (1, 3, 8, 64, 256, 1000):
        for n_chunks in (1, 13, 38):
            splits = splits_for(rows, n_chunks, torch.device("cpu"))
            assert splits == 1 or rows * splits <= filtered.PROGRAMS_PER_SM * sms
            assert 1 <= splits <= min(n_chunks, filtered.MOST_SPLITS)


# 0.1% points of chi-squared by degrees of freedom.


# The head of a batch with filtered rows.


def make_head(rows: int, vocab: int, dtype: torch.dtype, device: str) -> dict:
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden, weight = torch.randn(rows, 48, generator=generator), torch.randn(vocab, 48, generator=generator)
    return {"hidden": hidden.to(device, dtype), "weight": (weight / 3).to(device, dtype)}


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("vocab", [101, 300])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_the_head_leaves_logits_masses_and_largest_of_filtered_rows(rows, vocab, device, dtype):
    head, state = make_head(rows, vocab, dtype, device), make_state(rows, [*RULES[:5], *OTHERS], device)
    expected, found = filtered_tiles_ref(**head, state=state), filtered_tiles(**head, state=state)
    rows_kept, slack = state.filtered, TOLERANCE[dtype]
    assert_near(found.logits[rows_kept, :vocab], expected.logits[rows_kept], slack)
    assert (found.logits[rows_kept, vocab:] == -math.inf).all()
    assert_near(found.values.amax(dim=1, keepdim=True)[rows_kept], expected.values[rows_kept], slack)
    assert_near(found.maxima.amax(dim=1, keepdim=True)[rows_kept], expected.maxima[rows_kept], slack)
    assert not found.arrived.any()
    below = found.maxima - found.maxima.amax(dim=1, keepdim=True)
    mass = (found.masses * (below / state.temperatures[:, None]).exp()).sum(dim=1, keepdim=True)
    assert_near(mass[rows_kept], expected.masses[rows_kept], max(50 * slack, 1e-4))
    best = found.values.argmax(dim=1, keepdim=True)
    if dtype == torch.float32:
        drawn = ~rows_kept | state.by_mass
        assert torch.equal(found.indices.gather(1, best)[drawn], expected.indices[drawn])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("rows", [8, 33])
def test_the_head_penalises_what_a_row_has_seen(rows, device, dtype):
    vocab, state = 131, make_state(rows, [*RULES[:3], *OTHERS], device)
    head = make_head(rows, vocab, dtype, device)
    counts = torch.randint(0, 6, (rows, vocab), generator=torch.Generator().manual_seed(1)).int().to(device)
    state.counts.copy_(torch.arange(rows).flip(0) * (torch.arange(rows) % 4 > 0))
    for column, value in (("repetition", 1.7), ("presence", 0.5), ("frequency", -0.3)):
        getattr(state, column).fill_(value)
    expected = filtered_tiles_ref(**head, state=state, counts=counts)
    found = filtered_tiles(**head, state=state, counts=counts)
    assert_near(found.logits[state.filtered, :vocab], expected.logits[state.filtered], TOLERANCE[dtype])
    best, index = found.values.max(dim=1, keepdim=True)
    assert_near(best, expected.values, TOLERANCE[dtype])
    plain = filtered_tiles_ref(**head, state=state)
    assert not torch.equal(plain.logits, expected.logits)
    if dtype == torch.float32:
        own = ~state.filtered
        assert torch.equal(found.indices.gather(1, index)[own], expected.indices[own])


@guarded
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("rows", [5, 33])
def test_head_and_choice_draw_the_same_tokens_again_and_again(rows, device, dtype):
    """Whatever the memory of their results held before."""
    head, state = make_head(rows, 1000, dtype, device), make_state(rows, [*BY_MASS, *OTHERS], device)
    heads, choose = filtered_tiles, partial(choose_filtered, splits=always(3))
    times = []
    for _ in range(2):
        tiles = heads(**head, state=state)
        choose(tiles=tiles, state=state)
        assert torch.equal(tiles.arrived, 3 * state.by_mass.int())
        times.append(tokens_of(tiles, state))
    assert torch.equal(*times)


@pytest.mark.parametrize("device", ["reference", *TRITON_DEVICES])
def test_a_steps_input_is_counted_if_it_is_of_the_output_and_its_row_has_counts(device):
    count = count_tokens_ref if device == "reference" else count_tokens
    device = "cpu" if device == "reference" else device
    state, table = (
        DeviceState(5, 2, torch.device(device)),
        torch.zeros(4, 9, dtype=torch.int32, device=device),
    )
    state.tokens.copy_(torch.tensor([7, 7, 3, 8, 5]))
    state.positions.copy_(torch.tensor([4, 4, 3, INERT, 9]))
    state.prompts.fill_(4)
    state.counts.copy_(torch.tensor([2, 0, 1, 4, 3]))
    count(state=state, table=table)
    count(state=state, table=table)
    assert table.nonzero().tolist() == [[1, 7], [2, 5]] and table.sum() == 8


# A GPU's own.


@pytest.mark.gpu
@pytest.mark.parametrize(("device", "dtype"), PLACES[-3:])
@pytest.mark.parametrize(("vocab", "width"), [(50257, 768), (151936, 1024)])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_head_and_choice_draw_as_specified_at_real_sizes(rows, vocab, width, device, dtype):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = (3 * torch.randn(vocab, width, generator=generator) / width**0.5).to(device, dtype)
    state = make_state(rows, [*RULES, *OTHERS], device, seed=rows)
    tiles = filtered_tiles(hidden=hidden, weight=weight, state=state)
    kept = state.filtered
    logits = tiles.logits[kept, :vocab].clone()
    own = state.at(kept.nonzero()[:, 0])
    choose_filtered(tiles=tiles, state=state)
    settings = own.temperatures, own.top_k, own.top_p, own.min_p, own.seeds, own.positions + 1
    sure, expected = sure_rows(logits, own), draw(logits, *settings)
    assert torch.equal(tokens_of(tiles, state)[kept.cpu()][sure.cpu()], expected[sure].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33])
def test_dependent_launches_in_a_replayed_graph_equal_ordinary_ones(rows):
    """The norm before, then head, choice and the rows' advance."""
    width, vocab = 768, 50257
    state = DeviceState(rows, 4, torch.device("cuda"))
    slots = torch.arange(rows, device="cuda")
    x, ones = (torch.ones(shape, device="cuda", dtype=torch.float16) for shape in ((rows, width), (width,)))
    weight = random_logits(vocab, width, "cuda", size=width**-0.5).half()

    def refill(seed: int) -> None:
        x.copy_(random_logits(rows, width, "cuda", seed))
        state.rows.copy_(
            make_state(rows, [*RULES, *OTHERS], "cuda", seed).at(slots).rows[:, : state.rows.shape[1]]
        )

    def chain(kernels) -> tuple[Tensor, ...]:
        hidden = kernels.add_norm(x=x, scale=ones, shift=ones, eps=1e-5)
        tiles = kernels.filtered_tiles(hidden=hidden, weight=weight, state=state)
        kernels.choose_filtered(tiles=tiles, state=state)
        kernels.advance(state=state, slots=slots, values=tiles.values, indices=tiles.indices)
        return hidden, state.tokens, state.positions

    assert_replays_equal_ordinary_launches(chain, refill)
