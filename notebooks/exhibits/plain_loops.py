"""Greedy decode loops in plain torch, each without one mistake of the loop before it.

T: number of tokens of a sequence so far, the prompt's included.
S: number of tokens that a cache has room for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rosellm.lab.diagnose.steps import Loop
from rosellm.models.model import Transformer


class NoCache:
    def __init__(self, gpt: Transformer, prompts: list[list[int]], room: int):
        self.gpt, self.prompts, self.room = gpt, prompts, room
        self.batch, self.context = len(prompts), len(prompts[0])
        positions = min(gpt.config.n_positions, 4 * (self.context + room))
        self.at = torch.arange(positions, device=gpt.device)

    def start(self):
        self.tokens = torch.tensor(self.prompts, device=self.gpt.device)  # [B, T]

    def hidden(self):
        return torch.cat([self.last(row) for row in range(self.batch)])  # [B, C]

    @torch.inference_mode()
    def step(self):
        new = self.gpt.logits(self.hidden()).argmax(-1, keepdim=True)  # [B, 1]
        self.tokens = torch.cat((self.tokens, new), 1)

    def last(self, row):
        def attend(layer, q, k, v):  # [T, H, D] and [T, H_kv, D]
            batched = (x.transpose(0, 1)[None] for x in (q, k, v))
            return attention(self.gpt, *batched, is_causal=True)[0].transpose(0, 1)

        ids = self.tokens[row]
        return self.gpt(ids, self.at[: len(ids)], attend)[-1:]  # [1, C]


def attention(gpt: Transformer, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """q [B, H, T, D], k and v [B, H_kv, S, D] → [B, H, T, D]."""
    options |= {"scale": gpt.config.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def as_steps(one: NoCache, name: str | None = None) -> Loop:
    """Return the loop as steps to diagnose."""
    per_token = one.gpt.config.kv_bytes_per_token(one.gpt.dtype.itemsize)
    options: dict[str, Any] = {"start": one.start, "kv_bytes": one.batch * one.context * per_token}
    return Loop(one.step, one.gpt, one.batch, name=name or type(one).__name__, **options)


def prefill(gpt: Transformer, tokens: Tensor) -> dict[int, Tensor]:
    """Layer → keys and values of all tokens but the last, [2, B, H_kv, T - 1, D]."""
    past, ids = {}, tokens[:, :-1]

    def keep(layer, q, k, v):
        q, k, v = (x.unflatten(0, ids.shape).transpose(1, 2) for x in (q, k, v))
        past[layer] = torch.stack((k, v))
        return attention(gpt, q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    gpt(ids.flatten(), torch.arange(ids.shape[1], device=ids.device).repeat(len(ids)), keep)
    return past


class RowByRow(NoCache):
    def start(self):
        super().start()
        past = prefill(self.gpt, self.tokens)
        self.past = {(layer, row): past[layer][:, row, None] for layer in past for row in range(self.batch)}
        self.lengths = torch.full((self.batch,), self.context - 1, device=self.at.device)

    def last(self, row):
        def attend(layer, q, k, v):
            known = self.past[layer, row][..., : self.lengths[row].item(), :]
            both = self.past[layer, row] = torch.cat((known, torch.stack((k, v))[..., None, :]), -2)
            return attention(self.gpt, q[..., None, :], *both)[..., 0, :]

        n = self.tokens.shape[1] - 1
        self.lengths[row] = n
        return self.gpt(self.tokens[row, -1:], self.at[n : n + 1], attend)


class Padded(NoCache):
    def start(self):
        super().start()
        self.past = prefill(self.gpt, self.tokens)

    def hidden(self):
        n = self.tokens.shape[1] - 1
        return self.gpt(self.tokens[:, -1], self.at[n].expand(self.batch), self.attend)

    def attend(self, layer, q, k, v):
        both = self.past[layer] = torch.cat((self.past[layer], torch.stack((k, v))[..., None, :]), -2)
        n = both.shape[-2]
        padded = torch.nn.functional.pad(both, (0, 0, 0, len(self.at) - n))
        mask = (self.at < n)[None, None, None]  # [1, 1, 1, S]
        return attention(self.gpt, q[..., None, :], *padded, attn_mask=mask)[..., 0, :]


class InPlace(Padded):
    def start(self):
        super().start()
        room_for = (0, 0, 0, self.room + 1)
        self.past = {layer: torch.nn.functional.pad(both, room_for) for layer, both in self.past.items()}

    def attend(self, layer, q, k, v):
        both = self.past[layer][..., : self.tokens.shape[1], :]
        both[..., -1, :] = torch.stack((k, v))
        return attention(self.gpt, q[..., None, :], *both)[..., 0, :]


class Static(InPlace):
    """Every step has the same shapes and addresses: the position is on the device, a mask hides the rest."""

    def __init__(self, gpt: Transformer, prompts: list[list[int]], room: int):
        super().__init__(gpt, prompts, room)
        super().start()
        self.cache, self.n, self.new = self.past, self.at[:1].clone(), self.tokens[:, -1].clone()

    def start(self):
        super().start()
        for layer, both in self.past.items():
            self.cache[layer].copy_(both)
        self.n.fill_(self.context - 1)
        self.new.copy_(self.tokens[:, -1])

    @torch.inference_mode()
    def step(self):
        self.new.copy_(self.next_tokens())
        self.n += 1
        self.tokens = torch.cat((self.tokens, self.new[:, None]), 1)

    def next_tokens(self):
        hidden = self.gpt(self.new, self.n.expand(self.batch), self.attend)  # [B, C]
        return self.gpt.logits(hidden).argmax(-1)  # [B]

    def attend(self, layer, q, k, v):
        both = self.cache[layer].index_copy_(-2, self.n, torch.stack((k, v))[..., None, :])
        mask = (self.at[: both.shape[-2]] <= self.n)[None, None, None]  # [1, 1, 1, S]
        return attention(self.gpt, q[..., None, :], *both, attn_mask=mask)[..., 0, :]


class Compiled(Static):
    """The static loop in kernels that torch generates, and in a CUDA graph on a GPU."""

    def __init__(self, gpt: Transformer, prompts: list[list[int]], room: int):
        super().__init__(gpt, prompts, room)
        self.next_tokens = torch.compile(
            self.next_tokens, mode="reduce-overhead", fullgraph=True, dynamic=False
        )
        for one in (self.at, self.n, self.new, *self.cache.values()):
            torch._dynamo.mark_static_address(one)  # the graph reads and writes them where they are


LOOPS = NoCache, RowByRow, Padded, InPlace, Static, Compiled
