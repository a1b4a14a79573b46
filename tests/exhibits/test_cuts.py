"""How a model is cut: every element on one rank, bytes and sums counted, and sums seen as they run."""

from __future__ import annotations

import pytest
import torch

from rosellm.models.loading import arch_of
from rosellm.models.model import Transformer
from rosellm.models.part import Part
from rosellm.roseinfer.exhibits import load_exhibit

cuts = load_exhibit("cuts")
MODELS = {name: arch_of(name) for name in ("rose-tiny", "rose-tiny-qwen3")} | cuts.MODELS


@pytest.mark.parametrize("model, n_ranks", [("rose-tiny", 4), ("rose-tiny-qwen3", 2), ("Llama-3.1-8B", 8)])
def test_every_element_of_a_matrix_is_on_one_rank_which_has_those_that_its_model_allocates(model, n_ranks):
    arch = MODELS[model]
    matrices = {f"{one.name}.weight": one for one in cuts.cut_matrices(arch, n_ranks)}
    for one in matrices.values():
        assert one.is_cut_by_columns == (one.name in ("out", "down"))
        if arch.d_model < 1024:
            covered = torch.zeros(one.rows, one.columns, dtype=torch.int8)
            for region in one.regions:
                rows, columns = (slice(span.start, span.stop) for span in (region.rows, region.columns))
                covered[rows, columns] += 1
            assert (covered == 1).all()
    for rank in range(n_ranks):
        with torch.device("meta"):
            own = Transformer(arch, Part(rank, n_ranks))
        sizes = {name: one.numel() for name, one in own.blocks[0].named_parameters() if one.dim() == 2}
        sizes["lm_head.weight"] = own.lm_head.weight.numel()
        assert {name: one.elements(rank) for name, one in matrices.items()} == sizes
