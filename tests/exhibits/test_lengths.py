"""Contexts of one sum, and steps of an engine that takes their rows whole or cuts them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rosellm.errors import OptionError, RecipeError
from rosellm.lab.records import step_time
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.records import find
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant
from tests.helpers import CPU, MODERN, TRITON_DEVICES, random_model, small_config

lengths = load_exhibit("lengths")
attention_kernels, contexts_of = lengths.attention_kernels, lengths.contexts_of
launched, length_steps = lengths.launched, lengths.length_steps
CUT = Variant(16, 3)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 63, 64, 256])
@pytest.mark.parametrize("mean", [4, 7, 24, 240])
def test_contexts_have_one_sum_and_every_row_a_token(batch, mean):
    found = contexts_of(batch, mean)
    for contexts in found.values():
        assert len(contexts) == batch and sum(contexts) == batch * mean and min(contexts) >= 1
        assert max(contexts) <= mean * lengths.TIMES
    assert set(found["equal"]) == {mean}
    if batch > lengths.TIMES < mean:
        others = sorted(found["one long"])[:-1]
        assert max(found["one long"]) == lengths.TIMES * mean and others[-1] - others[0] <= 1
        assert found == contexts_of(batch, mean)
        assert max(found["spread"]) > 1.5 * mean and found["spread"] != sorted(found["spread"])


def test_a_mean_without_a_share_for_each_row_is_refused():
    with pytest.raises(OptionError, match="mean is 3; give 4 or more"):
        contexts_of(8, 3)


@pytest.mark.slow
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_an_engine_cuts_its_rows_as_it_is_asked_to_and_gives_the_same_tokens(device):
    model = random_model(5).to(device)
    plans = []
    kernels = attention_kernels(model.device)

    def planned(*arguments):
        plans.append(kernels.plan_attention(*arguments))
        return plans[-1]

    noted = replace(kernels, plan_attention=planned)
    prompts, tokens = make_prompts(2, [3, 40], model.config.vocab_size), []
    for variant in (Variant(16), CUT):
        prepare = launched(lambda *shape, chosen=variant: chosen)
        bench = Bench(model, "split_kv", prompts, 4, kernels=noted, prepare=prepare)
        bench.decode(3)
        tokens.append(bench.tokens)
        assert plans and {plan.variant for plan in plans} == {variant}
        plans.clear()
    assert tokens[0] == tokens[1]


def test_an_engine_without_variants_of_attention_says_so():
    prompts = make_prompts(1, [3], 50)
    for rung in ("dense", "split_kv"):  # the second has torch's attention
        with pytest.raises(RecipeError, match="kernels 'torch' is not launched in variants"):
            Bench(random_model(5), rung, prompts, 4, kernels="torch", prepare=launched(lambda *shape: CUT))


@pytest.mark.slow
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("shape", [{}, MODERN], ids=["single heads", "groups"])
def test_steps_of_every_share_are_timed_whole_and_cut_and_read_back(shape, device, monkeypatch):
    monkeypatch.setattr(step_time, "STRETCH", 2)
    model = random_model(5, small_config(n_layers=1, **shape)).to(device)
    launched_by = {}

    def noting(way, choose):
        def chosen(*given):
            variant = choose(*given)
            launched_by.setdefault(way, set()).add((given[4], variant.combine))
            return variant

        return chosen

    ways = {way: noting(way, choose) for way, choose in lengths.WAYS.items()}
    monkeypatch.setattr(lengths, "WAYS", ways)
    steps = length_steps(model, 2, 4, engines=1, seconds=0.0, turns=1)
    group = model.config.group
    assert launched_by == {"whole": {(group, False)}, "cut": {(group, True)}}
    names = [f"{share}, {way}" for share in ("equal", "spread", "one long") for way in ("whole", "cut")]
    assert list(steps) == names and all(one.us > 0 for one in steps.values())
    read = step_time.step_times(step_time.figures_of(3, 8, steps)["turns_us"])
    assert list(read) == names
    assert read["equal, cut"].us == pytest.approx(steps["equal, cut"].us, abs=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all kernels are Triton's")
def test_without_a_gpu_only_attention_is_interpreted():
    kernels = attention_kernels(CPU)
    assert kernels.append_and_attend is not lengths.TORCH.append_and_attend
    assert kernels.embed is lengths.TORCH.embed


def test_recorded_batches_are_read_with_every_share_and_way():
    names = [f"{share}, {way}" for share in lengths.contexts_of(8) for way in lengths.WAYS]
    recorded = lengths.recorded_lengths(find())
    assert recorded and all(list(steps) == names for steps in recorded.values())


def test_the_longest_row_fits_the_positions_that_are_told():
    most = lengths.mean_within(512)
    assert lengths.positions_for(most) <= 512 < lengths.positions_for(most + 1)
    assert lengths.mean_within(1024) == lengths.MEAN and lengths.positions_for(lengths.MEAN) <= 1024
    with pytest.raises(OptionError, match="need 50 positions; there are 49"):
        lengths.mean_within(49)


@pytest.mark.parametrize(
    ("whole", "cut", "faster"),
    [
        ((5, 6), (8, 9), "whole"),
        ((5, 6), (2, 3), "cut"),
        ((5, 6), (7, 8), "either"),
        ((5, 7), (6, 9), "either"),
        ((5, 5), (5, 5), "either"),
    ],
)
def test_a_way_is_faster_if_its_engines_are_apart_by_more_than_twice_their_spread(whole, cut, faster):
    steps = {
        f"spread, {way}": step_time.StepTimes(tuple((float(us),) for us in engines))
        for way, engines in (("whole", whole), ("cut", cut))
    }
    assert lengths.faster_way(steps, "spread") == faster
