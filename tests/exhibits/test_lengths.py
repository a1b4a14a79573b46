"""Contexts of one sum, and steps of an engine that takes their rows whole or cuts them."""

from __future__ import annotations

import pytest

from rosellm.errors import OptionError, RecipeError
from rosellm.lab.records import step_time
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant
from tests.helpers import MODERN, TRITON_DEVICES, random_model, small_config

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
