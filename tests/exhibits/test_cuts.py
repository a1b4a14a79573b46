"""How a model is cut: every element on one rank, bytes and sums counted, and sums seen as they run."""

from __future__ import annotations

import pytest
import torch

from rosellm.models.loading import arch_of
from rosellm.models.model import Transformer
from rosellm.models.part import Part
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.tensor_parallel import load_engine

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


def test_a_step_reads_half_of_the_matrices_on_each_of_two_and_sums_twice_a_layer():
    for arch in cuts.MODELS.values():
        one, two = cuts.step_bytes(arch), cuts.step_bytes(arch, 2)
        assert two == pytest.approx(one / 2, rel=1e-3)
        assert cuts.sums_a_step(arch) == 2 * arch.n_layers
    arch = MODELS["rose-tiny"]
    n = sum(one.numel() for name, one in Transformer(arch).named_parameters() if one.dim() == 2)
    positions = arch.n_positions * arch.d_model
    assert cuts.step_bytes(arch, itemsize=4) == 4 * (n - positions)


@pytest.mark.slow
def test_a_step_s_sums_are_seen_and_the_tokens_are_those_of_one_rank():
    prompts = [[5, 6, 7], [8, 9]]
    sizes = {"device": "cpu", "max_batch_size": 2, "max_model_len": 16, "recipe": cuts.WATCHED}
    engines = [load_engine(tensor_parallel_size=n, **sizes) for n in (1, 2)]
    collectives = engines[1].group.collectives
    (alone, unsummed), (together, steps) = (cuts.decoded(engine, prompts, 4) for engine in engines)
    arch = MODELS["rose-tiny"]
    assert alone == together and [len(tokens) for tokens in alone] == [5, 5]
    assert [len(one.sums) for one in steps] == [cuts.sums_a_step(arch)] * 4
    assert not any(one.sums for one in unsummed)
    assert {n for one in steps for n in one.n_bytes} == {2 * arch.d_model * 4}
    assert engines[1].group.collectives is collectives
    for one in steps:
        edges = [at for both in sorted([*one.computing, *one.sums]) for at in both]
        assert edges == sorted(edges) and (edges[0], edges[-1]) == (one.start, one.end)
        assert 0 < one.share < 1
