"""Which GEMMs a rank's layers have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rosellm.models.part import Part
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.table import TRITON
from rosellm.roseinfer.layers.cut import SUMMED_ROWS, cut_layers
from rosellm.roseinfer.layers.fused import FusedLayers
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from tests.helpers import random_model, small_config

RANKS = SimpleNamespace(
    part=Part(0, 2),
    summed=lambda x: x,
    peers=lambda n_bytes: PeerMemory(Part(0, 2), torch.zeros(n_bytes), torch.zeros(2, dtype=torch.int64)),
)


@pytest.mark.parametrize("all_reduce", ["one_shot", "library"])
def test_out_and_down_are_split_where_the_sum_over_ranks_takes_their_partial_sums(monkeypatch, all_reduce):
    monkeypatch.setattr(ring, "runs_on", lambda device, dtype: True)
    model = random_model(0, small_config(d_model=1024, d_ff=4096, n_layers=1))
    decode, prefill = cut_layers("fused", "epilogue", "small_m", all_reduce, model, TRITON, RANKS)
    splits = all_reduce == "one_shot"
    for rows, layers_for in ((1, decode), (2, decode), (SUMMED_ROWS, decode), (SUMMED_ROWS, prefill)):
        layers = layers_for(rows)
        assert isinstance(layers, FusedLayers)
        if splits:
            assert layers.products.parts_of(rows, 1024, 4096) == ring.parts_of(rows, 1024, 4096) > 1
            assert layers.products.qkv_parts_of(rows, 1536, 1024) == (2 if layers_for is decode else 1)
        else:
            assert layers_for(SUMMED_ROWS).products.parts_of(SUMMED_ROWS, 1024, 4096) == 1
    more = SUMMED_ROWS + 1
    whole = decode(more).products
    assert whole.parts_of(more, 1024, 4096) == whole.qkv_parts_of(more, 1536, 1024) == 1
