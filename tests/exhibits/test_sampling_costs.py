"""What a mode of sampling adds to a step: bytes by what the kernels move, µs by medians."""

import pytest
import torch

from rosellm.lab.records.records import find
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.filtered_head import filtered_tiles_ref
from tests.helpers import CPU, small_config

costs, modes_of = load_exhibit("sampling_costs"), load_exhibit("sampling_steps").modes_of
GREEDY = costs.GREEDY


def test_a_committed_record_has_every_mode_of_every_batch():
    for model_name, batches in costs.recorded_modes(find()).items():
        for batch, modes in batches.items():
            assert list(modes) == list(modes_of(batch)), f"{model_name}, {batch}"


def test_a_filtered_row_moves_its_logits_and_a_penalised_one_its_counts_too():
    arch = small_config(vocab_size=128)
    state = DeviceState(6, 2, CPU)
    state.temperatures.fill_(1.0)
    state.top_k.fill_(3)
    tiles = filtered_tiles_ref(hidden=torch.ones(6, 32), weight=torch.ones(128, 32), state=state)
    counts = torch.zeros(6, arch.vocab_size, dtype=torch.int32)
    logits_bytes = tiles.logits.numel() * 4
    found = costs.extra_bytes(arch, 6)
    assert found["top-k, top-p"] == 6 * found["top-k, top-p: one row"] == logits_bytes
    assert found["+ penalties"] == logits_bytes + counts[:6].numel() * counts.itemsize
    assert found["temperature"] == 0


@pytest.mark.parametrize(("batch", "runs"), [(1, 1), (64, 1), (65, 2), (256, 4)])
def test_log_probabilities_read_the_head_once_a_run(batch, runs):
    arch = small_config()
    one, many = (costs.extra_bytes(arch, n)["logprobs"] for n in (1, batch))
    logits = (one - 2 * 101 * 32) * batch
    assert many - logits == runs * 2 * 101 * 32
    assert costs.extra_bytes(arch, batch)["logprobs: one row"] == one


def test_what_a_mode_adds_is_the_difference_of_medians():
    turns = {GREEDY: [9.0, 10.0, 30.0], "top-p": [1.0, 14.0, 15.0]}
    assert costs.extra_us(turns) == {"top-p": 4.0}
