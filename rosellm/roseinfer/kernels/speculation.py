"""Speculation: draft a row's next tokens from its own text, and accept those that the model chooses, too.

A step of k draft tokens runs each state row as k + 1 verify rows: the row's last token, then its drafts, at
consecutive positions. Drafts are the tokens that followed the latest occurrence of the longest suffix of
the row's text (prompt lookup, Saxena 2023; Yang et al. 2023, "Inference with reference"), or what a smaller
model wrote behind the text (:mod:`draft_model`). The model chooses a token after each of them; a choice
counts if all drafts before it were the model's choices. Since the choice at a position depends on nothing
but the tokens before it, the request's seed and that position, a row gets the tokens that it would get
without drafts, sampled ones included (Leviathan et al. 2023, arXiv:2211.17192, accept more often, but keep
only the distribution).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import (
    ADVANCED,
    COUNTS,
    FIELDS,
    INERT,
    INT32_MAX,
    POSITION,
    ROUNDS,
    TEMPERATURE,
    TOKEN,
    DeviceState,
)
from rosellm.roseinfer.kernels import penalties
from rosellm.roseinfer.kernels.advance import chosen_token, ends_row
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.prefill_tiles import COLUMNS
from rosellm.roseinfer.sampling import NOT_FINITE
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

STEPS = "write_prompts", "match", "expand", "choose", "accept", "uncached"
ROLES = dict.fromkeys((f"_{step}_kernel" for step in STEPS), "sampling")
LONGEST, SHORTEST = 8, 2  # tokens of a suffix that are compared, and that must occur again
CHUNK = 1024  # tokens of a text per program
PLACE_BITS = 26


@dataclass(frozen=True)
class Texts:
    """The text of every state row on the device.

    tokens: int32 ``[S, L]``, the token at each position. A row's first generated token may be missing.
    wants_drafts: int32 ``[S]``, 0 for a row that must get no drafts.
    n_cached: int32 ``[S]``, how many tokens of a row the draft model has cached, if there is one.
    """

    tokens: Tensor
    wants_drafts: Tensor
    n_cached: Tensor


@dataclass(frozen=True)
class Verified:
    """The inputs of a step of R state rows with k draft tokens each.

    state: R * (k + 1) verify rows, those of each state row one after another. They copy the fields of their
        state row except token, position and counts; a place without a draft is an inert row of temperature 0
        without counts. Block tables are copied only if ``columns`` is None.
    columns: int32 ``[COLUMNS, R * pieces]``, the columns of ``prefill_tiles.tile_columns`` for one tile per
        state row, in the given number of pieces; its rows of the block table are the state rows. Or None.
    n_drafts: k.
    pieces: the number of pieces.
    copies: the row of the table of ``TokenCounts`` that the first verify row has for itself; the next rows
        follow. A draft has the counts of its own row if its state row has counts.
    """

    state: DeviceState
    columns: Tensor | None
    n_drafts: int
    pieces: int = 1
    copies: int = 0


def write_prompts_ref(*, state: DeviceState, slots: Tensor, last: Tensor, ids: Tensor, texts: Texts) -> None:
    """Write the prompts of new rows to their texts, for which drafts are then wanted (torch reference).

    state: the rows' contents; each position is that of the prompt's last token. Inert rows are ignored.
    slots: int64 ``[B]``, the index of each row's text.
    last: int64 ``[B]``, the index in ``ids`` of each prompt's last token.
    ids: int32 ``[N]``, the tokens of a packed prefill.

    A prompt of which the prefill has only the end gets a wrong text.
    """
    for slot, end, position in zip(slots.tolist(), last.tolist(), state.positions.tolist(), strict=True):
        if position >= 0:
            n = min(position, end) + 1
            texts.tokens[slot, position + 1 - n : position + 1] = ids[end + 1 - n : end + 1]
            texts.wants_drafts[slot], texts.n_cached[slot] = 1, position + 1


def propose_ref(
    *, state: DeviceState, texts: Texts, verified: Verified, shortest: int | None = SHORTEST
) -> None:
    """Append each row's last token to its text, draft its next tokens, and fill ``verified`` (reference).

    state: the R rows of the step.
    shortest: the fewest tokens of a suffix that must occur again; None if a draft model has written k drafts
        after the last token of each row's text.

    A row gets fewer drafts, or none, if its text has no such suffix, or if it ends before.
    """
    k, rows = verified.n_drafts, len(state.rows)
    wide = verified.state.rows.view(rows, k + 1, -1)
    n_words = wide.shape[2] if verified.columns is None else FIELDS
    wide[..., :n_words] = state.rows[:, None, :n_words]
    wide[:, 1:, COUNTS], wide[:, 1:, POSITION], wide[:, 1:, TEMPERATURE] = 0, INERT, 0
    positions, limits = state.positions.tolist(), state.limits.tolist()
    counts = [0] * rows
    for row, (position, limit) in enumerate(zip(positions, limits, strict=True)):
        if position < 0:
            continue
        texts.tokens[row, position] = state.tokens[row]
        counts[row] = 1
        if texts.wants_drafts[row] and (most := min(k, limit - 2 - position)) > 0:
            written, text = texts.tokens[row, position + 1 :][:most], texts.tokens[row, : position + 1]
            drafts = written if shortest is None else drafts_after(text, most, shortest)
            counts[row] += len(drafts)
            wide[row, 1 : counts[row], TOKEN] = drafts
            wide[row, 1 : counts[row], POSITION] = (
                position + 1 + torch.arange(len(drafts), device="cpu").int()
            )
            wide[row, 1 : counts[row], TEMPERATURE] = state.rows[row, TEMPERATURE]
            if state.counts[row] > 0:
                first = 1 + verified.copies + row * (k + 1)
                wide[row, 1 : counts[row], COUNTS] = first + torch.arange(1, counts[row], device="cpu").int()
    if verified.columns is not None:
        own, starts = torch.tensor(counts, dtype=torch.int32, device="cpu"), state.positions.clamp_min(0)
        _fill_columns(verified.columns.view(COLUMNS, rows, verified.pieces), own, starts, k + 1)


def _fill_columns(columns: Tensor, counts: Tensor, starts: Tensor, apart: int) -> None:
    """Describe one tile per row, in pieces: columns ``[COLUMNS, R, pieces]``, counts and starts ``[R]``.

    apart: the distance of the rows' first tokens.
    """
    index = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
    pieces = columns.shape[2]
    for column, values in enumerate((index * apart, counts, starts, index * apart, starts, index)):
        columns[column] = values[:, None]
    columns[6] = torch.arange(pieces, dtype=torch.int32, device=counts.device)
    columns[7] = pieces


def drafts_after(text: Tensor, most: int, shortest: int = SHORTEST) -> Tensor:
    """Return at most ``most`` drafts for the tokens after ``text [n]``; none if no suffix occurs again.

    Of the longest suffix, ``shortest`` to ``LONGEST`` tokens, the latest occurrence is continued. If it ends
    fewer than ``most`` tokens before the text does, the tokens after it repeat.
    """
    last = len(text) - 1
    alive = text[:last] == text[last]  # [last], by the place at which an occurrence ends
    length = alive.int()
    for back in range(1, min(LONGEST, last)):
        if not alive.any():
            break
        alive[:back] = False
        alive[back:] &= text[: last - back] == text[last - back]
        length += alive
    if not last or (longest := int(length.max())) < shortest:
        return text[:0]
    end = int((length == longest).nonzero()[-1])
    return text[end + 1 + torch.arange(most, device=text.device) % (last - end)]


def chosen_ref(values: Tensor | None, indices: Tensor) -> Tensor:
    """Return the token chosen in each row, ``[n]``; arguments as in ``advance_ref`` (torch reference)."""
    if values is None:
        return indices[:, 0]
    best = values.max(dim=1, keepdim=True).values
    tokens = torch.where(values == best, indices, INT32_MAX).min(dim=1).values
    return torch.where(best[:, 0].isinf(), NOT_FINITE, tokens)


def accept_ref(
    *, state: DeviceState, texts: Texts, verified: Verified, values: Tensor | None, indices: Tensor
) -> None:
    """Advance each row of a step by the choices that count, as ``advance_ref`` does (torch reference).

    values, indices: the choices of all verify rows, as the arguments of ``advance_ref``.

    A row's n choices are written to ``state.planes``, the last to plane 0, the one before it to plane 1 and
    so on; the planes after them receive INERT.
    """
    k, rows = verified.n_drafts, len(state.rows)
    chosen = chosen_ref(values, indices).view(rows, k + 1).int()
    drafts, places = (x.view(rows, k + 1) for x in (verified.state.tokens, verified.state.positions))
    positions, stops = state.positions[:, None], state.stops[:, None]
    stopped = (chosen == stops) | ((stops >= 0) & torch.isin(chosen, state.stop_tokens))
    each = positions + torch.arange(k + 1, device="cpu")
    ended = stopped | (each + 2 >= state.limits[:, None]) | (chosen < 0)
    follows = (places[:, 1:] >= 0) & (chosen[:, :-1] == drafts[:, 1:]) & ~ended[:, :-1]
    counts = 1 + follows.int().cumprod(dim=1).sum(dim=1)  # [R]
    live = state.positions >= 0
    i, row = (torch.arange(n, device="cpu") for n in (k + 1, rows))
    given = chosen.gather(1, (counts[:, None] - 1 - i).clamp_min(0))
    given = torch.where(live[:, None] & (i < counts[:, None]), given, INERT)
    state.planes[i[:, None], state.rounds.long(), row] = given.T.to(state.planes.device)
    kept = live[:, None] & (i < counts[:, None]) & (chosen >= 0)
    kept &= each + 1 < texts.tokens.shape[1]
    texts.tokens[row[:, None].expand_as(kept)[kept], each[kept].long() + 1] = chosen[kept]
    last = (counts - 1)[:, None].long()
    token, is_last = chosen.gather(1, last)[:, 0], ended.gather(1, last)[:, 0]
    state.rounds.copy_((state.rounds + 1) % ROUNDS)
    state.tokens.copy_(torch.where(live & (token >= 0), token, state.tokens))
    state.positions.copy_(torch.where(live & ~is_last, state.positions + counts, INERT))


def gather_uncached_ref(
    *, state: DeviceState, texts: Texts, ids: Tensor, positions: Tensor, columns: Tensor
) -> None:
    """Gather tokens that the draft model has not cached, and count them as cached (torch reference).

    ids, positions: int32 ``[R * P]``: receive the next P tokens of each of the R rows and their positions;
        INERT at places without a token.
    columns: int32 ``[COLUMNS, R]``: receives one tile per row, as in ``prefill_tiles.tile_columns``.
    """
    rows = len(state.rows)
    places, starts = len(ids) // rows, texts.n_cached[:rows].clone()
    counts = (state.positions - starts).clamp(0, places)
    i = torch.arange(places, device=starts.device)
    at, there = starts[:, None] + i, i < counts[:, None]
    tokens = texts.tokens[:rows].gather(1, torch.where(there, at, 0).long())
    ids.copy_(torch.where(there, tokens, 0).view(-1))
    positions.copy_(torch.where(there, at, INERT).view(-1))
    _fill_columns(columns[:, :, None], counts, starts, places)
    texts.n_cached[:rows] += counts


@triton.jit
def _write_prompts_kernel(
    rows_ptr, slots_ptr, last_ptr, ids_ptr, text_ptr, drafted_ptr, cached_ptr, row_stride, text_stride,
    POSITION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the prompt of one row per program to its text."""
    place = tl.program_id(0).to(tl.int64)
    slot, last = tl.load(slots_ptr + place), tl.load(last_ptr + place)
    position = tl.load(rows_ptr + place * row_stride + POSITION)
    if position >= 0:
        tl.store(drafted_ptr + slot, 1)
        tl.store(cached_ptr + slot, position + 1)
        for begin in range(tl.maximum(position - last, 0), position + 1, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            tokens = tl.load(ids_ptr + last - position + at, mask=at <= position)
            tl.store(text_ptr + slot * text_stride + at, tokens, mask=at <= position)


def write_prompts(*, state: DeviceState, slots: Tensor, last: Tensor, ids: Tensor, texts: Texts) -> None:
    """Write prompts to texts as :func:`write_prompts_ref` does, in Triton."""
    strides = state.rows.stride(0), texts.tokens.stride(0)
    _write_prompts_kernel[(len(slots),)](
        state.rows, slots, last, ids, texts.tokens, texts.wants_drafts, texts.n_cached, *strides, POSITION,
        CHUNK,
    )  # fmt: skip


@triton.jit
def _match_kernel(
    rows_ptr, text_ptr, drafted_ptr, best_ptr, row_stride, text_stride, TOKEN: tl.constexpr,
    POSITION: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, CHUNK: tl.constexpr,
    PLACE_BITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find the longest suffix that ends again in one chunk of a row's text per program.

    Stores its length, above PLACE_BITS, and the latest place at which it ends; 0 if there is none. A token
    is loaded only for as long as all tokens after it match.
    """
    row = tl.program_id(0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    fields = rows_ptr + row.to(tl.int64) * row_stride
    text = text_ptr + row.to(tl.int64) * text_stride
    position = tl.load(fields + POSITION)
    begin = tl.program_id(1) * CHUNK
    best = 0
    if (tl.load(drafted_ptr + row) > 0) & (begin < position):
        place = begin + tl.arange(0, CHUNK)
        alive = tl.load(text + place, mask=place < position, other=-1) == tl.load(fields + TOKEN)
        length = alive.to(tl.int32)
        for back in range(1, LONGEST):
            wanted = tl.load(text + position - back, mask=position >= back, other=-1)
            there = alive & (place >= back)
            alive = there & (tl.load(text + place - back, mask=there, other=-2) == wanted)
            length += alive.to(tl.int32)
        best = tl.max(tl.where(length >= SHORTEST, (length << PLACE_BITS) + place, 0), axis=0)
    tl.store(best_ptr + row * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def _store_columns(column, stride, inside, first, count, start, row, piece, pieces):
    """Describe one tile, whose pieces are ``piece``, as ``prefill_tiles.tile_columns`` does."""
    zeros = piece * 0
    tl.store(column, zeros + first, mask=inside)
    tl.store(column + stride, zeros + count, mask=inside)
    tl.store(column + 2 * stride, zeros + start, mask=inside)
    tl.store(column + 3 * stride, zeros + first, mask=inside)
    tl.store(column + 4 * stride, zeros + start, mask=inside)
    tl.store(column + 5 * stride, zeros + row, mask=inside)
    tl.store(column + 6 * stride, piece, mask=inside)
    tl.store(column + 7 * stride, zeros + pieces, mask=inside)


@triton.jit
def _expand_kernel(
    rows_ptr, wide_ptr, columns_ptr, text_ptr, drafted_ptr, best_ptr, row_stride, wide_stride,
    columns_stride, text_stride, n_chunks, copies, N_WORDS: tl.constexpr, N_DRAFTS: tl.constexpr,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, PLACES: tl.constexpr, PIECES_PADDED: tl.constexpr,
    TOKEN: tl.constexpr, POSITION: tl.constexpr, LIMIT: tl.constexpr, TEMPERATURE: tl.constexpr,
    COUNTS: tl.constexpr, PLACE_BITS: tl.constexpr, WORDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the verify rows and the tile of one state row per program.

    best_ptr: the results of ``_match_kernel``; None if the drafts are written after the text.
    """
    row = tl.program_id(0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    fields = rows_ptr + row.to(tl.int64) * row_stride
    text = text_ptr + row.to(tl.int64) * text_stride
    token, position, limit = tl.load(fields + TOKEN), tl.load(fields + POSITION), tl.load(fields + LIMIT)
    i = tl.arange(0, PLACES)
    if best_ptr is None:
        has_drafts = tl.load(drafted_ptr + row) > 0
        source, is_known = position + i, i > 0
    else:
        chunk = tl.arange(0, CHUNKS)
        best = tl.max(tl.load(best_ptr + row * n_chunks + chunk, mask=chunk < n_chunks, other=0), axis=0)
        end = best & ((1 << PLACE_BITS) - 1)
        has_drafts = best > 0
        source = end + 1 + tl.maximum(i - 1, 0) % tl.maximum(position - end, 1)
        is_known = source < position
    n_drafts = tl.where(has_drafts, tl.maximum(tl.minimum(N_DRAFTS, limit - 2 - position), 0), 0)
    is_known = is_known & (i > 0) & (i <= n_drafts)
    tokens = tl.where(is_known, tl.load(text + source, mask=is_known, other=0), token)
    is_there = (position >= 0) & (i <= n_drafts)
    places = tl.where(is_there, position + i, -1)
    tl.store(text + position, token, mask=position >= 0)
    first = row * (N_DRAFTS + 1)
    own = tl.load(fields + COUNTS)
    counts = tl.where(i == 0, own, tl.where(is_there & (own > 0), 1 + copies + first + i, 0))
    for begin in range(0, N_WORDS, WORDS):
        word = begin + tl.arange(0, WORDS)
        copied = tl.load(fields + word, mask=word < N_WORDS, other=0)[None, :]
        copied = tl.where((word == TOKEN)[None, :], tokens[:, None], copied)
        copied = tl.where((word == POSITION)[None, :], places[:, None], copied)
        copied = tl.where((word == COUNTS)[None, :], counts[:, None], copied)
        copied = tl.where((word == TEMPERATURE)[None, :] & (is_there == 0)[:, None], 0, copied)
        target = wide_ptr + (first + i).to(tl.int64)[:, None] * wide_stride + word[None, :]
        tl.store(target, copied, mask=(i <= N_DRAFTS)[:, None] & (word < N_WORDS)[None, :])
    if columns_ptr is not None:
        piece = tl.arange(0, PIECES_PADDED)
        column, start = columns_ptr + row * PIECES + piece, tl.maximum(position, 0)
        count = tl.where(position >= 0, 1 + n_drafts, 0)
        _store_columns(column, columns_stride, piece < PIECES, first, count, start, row, piece, PIECES)


def propose(
    *, state: DeviceState, texts: Texts, verified: Verified, shortest: int | None = SHORTEST,
    dependent: int = False,
) -> None:  # fmt: skip
    """Append last tokens, draft, and fill ``verified`` as :func:`propose_ref` does, in Triton.

    dependent: the launch mode, as in ``launch_options``.
    """
    rows, n_chunks, k = len(state.rows), cdiv(texts.tokens.shape[1], CHUNK), verified.n_drafts
    best = None if shortest is None else texts.tokens.new_empty(rows, n_chunks)
    fields = {name: ADVANCED[name] for name in ("TOKEN", "POSITION")}
    strides = state.rows.stride(0), texts.tokens.stride(0)
    if best is not None:
        _match_kernel[(rows, n_chunks)](
            state.rows, texts.tokens, texts.wants_drafts, best, *strides, **fields, LONGEST=LONGEST,
            SHORTEST=shortest, CHUNK=CHUNK, PLACE_BITS=PLACE_BITS, **launch_options(dependent),
        )  # fmt: skip
    wide, columns = verified.state.rows, verified.columns
    n_words = state.rows.shape[1] if columns is None else FIELDS
    sizes = {
        "N_WORDS": n_words,
        "N_DRAFTS": k,
        "PIECES": verified.pieces,
        "WORDS": min(64, next_power_of_2(n_words)),
    }
    padded = {"CHUNKS": next_power_of_2(n_chunks), "PLACES": next_power_of_2(k + 1)}
    padded["PIECES_PADDED"] = next_power_of_2(verified.pieces)
    _expand_kernel[(rows,)](
        state.rows, wide, columns, texts.tokens, texts.wants_drafts, best, state.rows.stride(0),
        wide.stride(0), 0 if columns is None else columns.stride(0), texts.tokens.stride(0), n_chunks,
        verified.copies, **sizes, **padded, **fields, LIMIT=ADVANCED["LIMIT"], TEMPERATURE=TEMPERATURE,
        COUNTS=COUNTS, PLACE_BITS=PLACE_BITS, **launch_options(dependent),
    )  # fmt: skip


@triton.jit
def _choose_kernel(
    values_ptr, indices_ptr, chosen_ptr, TILES, WIDTH: tl.constexpr, NOT_FINITE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose the token of one verify row per program."""
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    place = tl.program_id(0)
    tl.store(chosen_ptr + place, chosen_token(values_ptr, indices_ptr, place, TILES, WIDTH, NOT_FINITE))


def choose(values: Tensor | None, indices: Tensor, dependent: int = False) -> Tensor:
    """Return chosen tokens as :func:`chosen_ref` does, in Triton. dependent: the launch mode."""
    if values is None:
        return indices[:, 0]
    rows, tiles = indices.shape
    chosen = indices.new_empty(rows)
    _choose_kernel[(rows,)](
        values, indices, chosen, tiles, next_power_of_2(tiles), NOT_FINITE, **launch_options(dependent)
    )
    return chosen


@triton.jit
def _accept_kernel(
    rows_ptr, wide_ptr, chosen_ptr, planes_ptr, stops_ptr, text_ptr, row_stride, wide_stride, plane_stride,
    ring_stride, text_stride, N_STOPS: tl.constexpr, N_DRAFTS: tl.constexpr, PLACES: tl.constexpr,
    TOKEN: tl.constexpr, POSITION: tl.constexpr, LIMIT: tl.constexpr, STOP: tl.constexpr, ROUND: tl.constexpr,
    ROUNDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Advance one state row per program by the choices that count."""
    row = tl.program_id(0)
    fields = rows_ptr + row.to(tl.int64) * row_stride
    position, limit, stop = tl.load(fields + POSITION), tl.load(fields + LIMIT), tl.load(fields + STOP)
    count = tl.load(fields + ROUND)
    i = tl.arange(0, PLACES)
    inside = i <= N_DRAFTS
    first = row * (N_DRAFTS + 1)
    wide = wide_ptr + (first + i).to(tl.int64) * wide_stride
    drafts = tl.load(wide + TOKEN, mask=inside, other=-1)
    places = tl.load(wide + POSITION, mask=inside, other=-1)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    chosen = tl.load(chosen_ptr + first + i, mask=inside, other=-1)
    before = tl.load(chosen_ptr + first + i - 1, mask=inside & (i > 0), other=-1)
    ended = ends_row(chosen, position + i, limit, stop, stops_ptr, N_STOPS)
    ended_before = ends_row(before, position + i - 1, limit, stop, stops_ptr, N_STOPS)
    fails = (i > 0) & ((places < 0) | (before != drafts) | ended_before | (inside == 0))
    live = position >= 0
    n = tl.min(tl.where(fails, i, N_DRAFTS + 1), axis=0)  # places before the first that fails
    is_last = i == n - 1
    token = tl.sum(tl.where(is_last, chosen, 0), axis=0)
    is_over = tl.sum(tl.where(is_last, ended.to(tl.int32), 0), axis=0) > 0
    given = tl.load(chosen_ptr + first + n - 1 - i, mask=i < n, other=-1)
    ring = planes_ptr + i.to(tl.int64) * plane_stride + count * ring_stride + row
    tl.store(ring, tl.where(live, given, -1), mask=inside)
    text = text_ptr + row.to(tl.int64) * text_stride + position + 1 + i
    kept = (i < tl.where(live, n, 0)) & (chosen >= 0)
    tl.store(text, chosen, mask=kept & (position + 1 + i < text_stride))
    tl.store(fields + ROUND, (count + 1) % ROUNDS)
    tl.store(fields + TOKEN, token, mask=live & (token >= 0))
    tl.store(fields + POSITION, tl.where(live & (is_over == 0), position + n, -1))


def accept(
    *, state: DeviceState, texts: Texts, verified: Verified, values: Tensor | None, indices: Tensor,
    dependent: int = False,
) -> None:  # fmt: skip
    """Advance rows as :func:`accept_ref` does, in Triton. dependent: the launch mode."""
    k, rows, chosen = verified.n_drafts, len(state.rows), choose(values, indices, dependent)
    wide, planes, text = verified.state.rows, state.planes, texts.tokens
    strides = state.rows.stride(0), wide.stride(0), planes.stride(0), planes.stride(1), text.stride(0)
    _accept_kernel[(rows,)](
        state.rows, wide, chosen, planes, state.stop_tokens, text, *strides, N_STOPS=len(state.stop_tokens),
        N_DRAFTS=k, PLACES=next_power_of_2(k + 1), **ADVANCED, ROUNDS=ROUNDS, num_warps=1,
        **launch_options(dependent),
    )  # fmt: skip


@triton.jit
def _uncached_kernel(
    rows_ptr, text_ptr, cached_ptr, ids_ptr, positions_ptr, columns_ptr, row_stride, text_stride,
    columns_stride, N_PLACES: tl.constexpr, PLACES: tl.constexpr, POSITION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gather the tokens of one state row per program."""
    row = tl.program_id(0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    start = tl.load(cached_ptr + row)
    position = tl.load(rows_ptr + row.to(tl.int64) * row_stride + POSITION)
    count = tl.maximum(tl.minimum(position - start, N_PLACES), 0)
    i, first = tl.arange(0, PLACES), row * N_PLACES
    text = text_ptr + row.to(tl.int64) * text_stride + start + i
    tl.store(ids_ptr + first + i, tl.load(text, mask=i < count, other=0), mask=i < N_PLACES)
    tl.store(positions_ptr + first + i, tl.where(i < count, start + i, -1), mask=i < N_PLACES)
    tl.store(cached_ptr + row, start + count)
    piece = tl.arange(0, 1)
    _store_columns(columns_ptr + row + piece, columns_stride, piece < 1, first, count, start, row, piece, 1)


def gather_uncached(
    *,
    state: DeviceState,
    texts: Texts,
    ids: Tensor,
    positions: Tensor,
    columns: Tensor,
    dependent: int = False,
) -> None:
    """Gather tokens as :func:`gather_uncached_ref` does, in Triton. dependent: the launch mode."""
    places = len(ids) // len(state.rows)
    strides = state.rows.stride(0), texts.tokens.stride(0), columns.stride(0)
    _uncached_kernel[(len(state.rows),)](
        state.rows, texts.tokens, texts.n_cached, ids, positions, columns, *strides, N_PLACES=places,
        PLACES=next_power_of_2(places), POSITION=POSITION, num_warps=1, **launch_options(dependent),
    )  # fmt: skip


class DraftKernels(NamedTuple):
    """The device functions of drafting, in Triton or torch, and whether their launches are dependent."""

    write_prompts: Callable[..., None]
    propose: Callable[..., None]
    accept: Callable[..., None]
    gather_uncached: Callable[..., None]
    fork_counts: Callable[..., None]
    count_accepted: Callable[..., None]
    dependent: bool = False


def draft_kernels(name: str, dependent: bool, drafted: bool = False) -> DraftKernels:
    """Return the functions for kernels called ``name``, "triton" or "torch".

    dependent: whether to use programmatic dependent launch.
    drafted: whether a draft model drafts.
    """
    shortest = None if drafted else SHORTEST
    if name == "torch":
        counting_refs = penalties.fork_counts_ref, penalties.count_accepted_ref
        proposing = partial(propose_ref, shortest=shortest)
        return DraftKernels(write_prompts_ref, proposing, accept_ref, gather_uncached_ref, *counting_refs)
    return DraftKernels(
        write_prompts,
        partial(propose, shortest=shortest, dependent=dependent),
        partial(accept, dependent=dependent),
        partial(gather_uncached, dependent=dependent),
        partial(penalties.fork_counts, dependent=dependent),
        partial(penalties.count_accepted, dependent=dependent),
        dependent,
    )
