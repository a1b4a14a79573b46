"""Draws from some tokens only: the kernels against the specification."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rosellm.models.quantized import HEAD_FORM, QuantizedRows, RowFormat
from rosellm.roseinfer.cache.device_state import INERT, DeviceState
from rosellm.roseinfer.cache.token_counts import WORD_COLUMNS
from rosellm.roseinfer.kernels import filtered
from rosellm.roseinfer.kernels.advance import advance_ref
from rosellm.roseinfer.kernels.draw import allowed_log_probs, draw
from rosellm.roseinfer.kernels.filtered import choose_filtered
from rosellm.roseinfer.kernels.filtered_head import Tiles, filtered_tiles, filtered_tiles_ref
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.kernels.table import TORCH, TRITON, Kernels
from rosellm.roseinfer.sampling import NOT_FINITE
from tests.roseinfer.kernels.kernel_checks import (
    TOLERANCE,
    assert_near,
    every_device,
    every_gpu_place,
    every_place,
    every_twin,
    guarded,
    normals,
    quantized,
)

pytestmark = guarded
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
    return (size * normals(seed)(rows, vocab)).to(device)


def drawn_by(kernels: Kernels, logits: Tensor, state: DeviceState, splits: int | None = None) -> Tensor:
    """The tokens drawn, by ``splits`` programs a row if that is given."""
    tiles, options = tiles_of(logits, state), {}
    if splits is not None and kernels is TRITON:
        options["splits"] = lambda rows, n_chunks, device: splits
    others, before = ~state.filtered, [x.clone() for x in tiles[:2]]
    kernels.choose_filtered(tiles=tiles, state=state, **options)
    assert all(torch.equal(x[others], y[others]) for x, y in zip(tiles[:2], before, strict=True))
    return tokens_of(tiles, state)


def assert_draws_as_specified(
    logits: Tensor, state: DeviceState, least_sure: float = 0.9, splits: int | None = None
) -> None:
    sure = sure_rows(logits, state).cpu()
    assert sure.float().mean() >= least_sure
    assert torch.equal(drawn_by(TRITON, logits, state, splits)[sure], drawn_by(TORCH, logits, state)[sure])


# Choosing.


@every_device
@pytest.mark.parametrize("vocab", [7, 64, 501, 5003])
@pytest.mark.parametrize("size", [0.5, 3.0, 10.0])
def test_filtered_rows_draw_the_tokens_of_the_specification(size, vocab, device):
    rules = [*RULES, *OTHERS]
    state = make_state(len(rules), rules, device, seed=vocab)
    assert_draws_as_specified(random_logits(len(rules), vocab, device, int(size), size), state, 0.8)


@every_device
@pytest.mark.parametrize("n_high", [1, 10, 30])
def test_more_candidates_than_are_kept_may_lie_in_a_few_tiles(n_high, device):
    """The bound is then that of other tiles: up to 2,000 candidates are copied for 190 that are kept."""
    rules = [(2.0, 190, 0.9, 0.0), (2.0, 190, 1.0, 0.0), (2.0, 190, 0.8, 1e-3), (2.0, 0, 0.5, 0.0)]
    state = make_state(len(rules), rules, device, seed=n_high)
    logits = random_logits(len(rules), 50257, device, n_high, size=1.0)
    logits[:, 640 : 640 + 64 * n_high] += 9
    assert_draws_as_specified(logits, state, 0.7)


@every_device
def test_of_equal_logits_the_first_are_kept(device):
    """Two values in turn: what is kept ends within the equals, by number, by mass, or by both."""
    rules = [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.1, 0.0), (1.0, 150, 0.5, 0.0), (1.0, 9, 0.5, 1.0)]
    state = make_state(40, rules, device)
    logits = (torch.arange(300) % 2).float().repeat(40, 1).to(device)
    tokens = drawn_by(TRITON, logits, state)
    assert set(tokens[0::4].tolist()) <= {1, 3, 5, 7, 9}
    assert tokens[1::4].max() < 2 * 0.1 * (150 + 150 / math.e) + 2 and tokens.remainder(2).all()
    assert tokens[2::4].max() <= 149 and tokens[3::4].max() <= 9
    assert torch.equal(tokens, drawn_by(TORCH, logits, state))


@every_device
@pytest.mark.parametrize(
    ("rules", "others", "logits", "drawn"),
    [
        ([(1.0, 3, 1.0, 0.0), (1.0, 3, 0.9, 0.0)], -5.0, {3: -0.0, 50: 0.0, 90: -0.0, 170: 0.0}, {3, 50, 90}),
        (
            [(1.0, 50, 1.0, 0.0), (1.0, 0, 0.999, 0.0), (1e30, 50, 0.9, 0.0), (3.0, 0, 1.0, 0.01)],
            -math.inf,
            {100: 1.0, 250: 1.0},
            {100, 250},
        ),
    ],
    ids=["zeros of either sign are equal", "what logits rule out is never drawn"],
)
def test_only_these_are_drawn(rules, others, logits, drawn, device):
    row = torch.full((300,), others, device=device)
    for token, logit in logits.items():
        row[token] = logit
    assert set(drawn_by(TRITON, row.repeat(32, 1), make_state(32, rules, device)).tolist()) == drawn


BY_MASS = [(1.0, 0, p, 0.0) for p in (0.9, 0.5, 0.1, 0.01)] + [(0.7, 0, 0.8, 0.0), (1e30, 0, 0.3, 0.0)]


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Of four tiles."""
    monkeypatch.setattr(filtered, "Sizes", partial(filtered.Sizes, CHUNK=256))


several_programs = pytest.mark.usefixtures("small_chunks")


@pytest.mark.filterwarnings("ignore:invalid value")
@several_programs
@every_twin
@pytest.mark.parametrize(
    ("rule", "splits"), [*((rule, None) for rule in RULES[:5]), *((rule, 3) for rule in BY_MASS[:2])], ids=str
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_probabilities_has_no_token_and_its_neighbours_have_theirs(
    bad, rule, splits, kernels, device
):
    state, logits = make_state(3, [rule], device), random_logits(3, 1000, device)
    expected = drawn_by(kernels, logits, state, splits)
    logits[1, slice(None) if bad == -math.inf else slice(700, 703)] = bad
    expected[1] = NOT_FINITE
    assert torch.equal(drawn_by(kernels, logits, state, splits), expected)


@several_programs
@every_device
def test_a_rows_token_is_the_same_in_any_company(device):
    rules = [*BY_MASS, *RULES[:4], *OTHERS]
    rows = 2 * len(rules)
    state, logits = make_state(rows, rules, device), random_logits(rows, 2001, device)
    together, slots = drawn_by(TRITON, logits, state, 1), torch.arange(rows, device=device)
    for row in range(rows):
        alone = drawn_by(TRITON, logits[row : row + 1], state.at(slots[row : row + 1]), 7)
        assert alone.item() == together[row], row


# The head of a batch with filtered rows.

KINDS = [*RULES[:5], *OTHERS]


def make_head(
    rows: int, vocab: int, dtype: torch.dtype, device: str, is_quantised: bool = False, width: int = 48
) -> dict:
    normal = normals(rows + vocab)
    hidden = normal(rows, width).to(device, dtype)
    weight = (2.3 * normal(vocab, width) / width**0.5).to(device, dtype)
    if not is_quantised:
        return {"hidden": hidden, "weight": weight}
    rows_of_codes = QuantizedRows.of(hidden, RowFormat(HEAD_FORM, 2))
    return {"hidden": rows_of_codes, "weight": quantized(weight, HEAD_FORM)}


@every_place
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("vocab", [101, 300])
@pytest.mark.parametrize(
    ("rows", "is_quantised"), [(1, False), (8, False), (33, False), (1, True), (33, True)]
)
def test_the_head_leaves_best_of_all_and_logits_masses_and_largest_of_filtered_rows(
    rows, is_quantised, vocab, penalised, device, dtype
):
    head, state = make_head(rows, vocab, dtype, device, is_quantised), make_state(rows, KINDS, device)
    head |= {"state": state}
    if penalised:
        seen = torch.randint(0, 6, (rows, vocab), generator=torch.Generator().manual_seed(1))
        head["counts"] = seen.int().to(device)
        state.counts.copy_(torch.arange(rows).flip(0) * (torch.arange(rows) % 4 > 0))
        for column, value in (("repetition", 1.7), ("presence", 0.5), ("frequency", -0.3)):
            getattr(state, column).fill_(value)
    expected, found = filtered_tiles_ref(**head), filtered_tiles(**head)
    kept, slack = state.filtered, TOLERANCE[dtype]
    assert_near(found.logits[kept, :vocab], expected.logits[kept], slack)
    assert (found.logits[kept, vocab:] == -math.inf).all()
    best, tile = found.values.max(dim=1, keepdim=True)
    assert_near(best, expected.values, slack)
    assert_near(found.maxima.amax(dim=1, keepdim=True)[kept], expected.maxima[kept], slack)
    assert not found.arrived.any()
    below = found.maxima - found.maxima.amax(dim=1, keepdim=True)
    mass = (found.masses * (below / state.temperatures[:, None]).exp()).sum(dim=1, keepdim=True)
    assert_near(mass[kept], expected.masses[kept], max(50 * slack, 1e-4))
    if dtype == torch.float32:
        drawn = ~kept | state.by_mass
        assert torch.equal(found.indices.gather(1, tile)[drawn], expected.indices[drawn])
    if penalised and state.counts.any():
        assert not torch.equal(filtered_tiles_ref(**head | {"counts": None}).logits, expected.logits)


@every_twin
def test_a_steps_input_is_counted_if_it_is_of_the_output_and_its_row_has_counts(kernels, device):
    state = DeviceState(5, 2, torch.device(device))
    table = torch.zeros(4, 9 + WORD_COLUMNS, dtype=torch.int32, device=device)
    state.tokens.copy_(torch.tensor([7, 7, 3, 8, 5]))
    state.positions.copy_(torch.tensor([4, 4, 3, INERT, 9]))
    state.prompts.fill_(4)
    state.counts.copy_(torch.tensor([2, 0, 1, 4, 3]))
    for _ in range(2):
        kernels.count_tokens(state=state, table=table)
    assert table.nonzero().tolist() == [[1, 7], [2, 5]] and table.sum() == 8


# A GPU's own.


@pytest.mark.gpu
@every_gpu_place
@pytest.mark.parametrize(("vocab", "width"), [(50257, 768), (151936, 1024)])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_head_and_choice_draw_as_specified_at_real_sizes(is_quantised, rows, vocab, width, device, dtype):
    state = make_state(rows, [*RULES, *OTHERS], device, seed=rows)
    tiles = filtered_tiles(**make_head(rows, vocab, dtype, device, is_quantised, width), state=state)
    kept = state.filtered
    logits = tiles.logits[kept, :vocab].clone()
    own = state.at(kept.nonzero()[:, 0])
    choose_filtered(tiles=tiles, state=state)
    settings = own.temperatures, own.top_k, own.top_p, own.min_p, own.seeds, own.positions + 1
    sure, expected = sure_rows(logits, own), draw(logits, *settings)
    assert torch.equal(tokens_of(tiles, state)[kept.cpu()][sure.cpu()], expected[sure].cpu())
