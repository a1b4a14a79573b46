"""What a decode step costs a CPU, counted and not timed: the default rung copies less than ``dense``."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams


class Cost(TorchDispatchMode):
    """Operators called, and bytes of the new tensors that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.n_bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            self.operators += 1
            for one in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(one, torch.Tensor) and not any(one is given for given in args):
                    self.n_bytes += one.nbytes
        return result


@pytest.fixture(scope="module")
def parts():
    return load_parts("rose-tiny", "cpu")


def cost_of_a_step(parts, rung: str | None, batch: int, length: int) -> Cost:
    engine = Engine(*parts, recipe=rung, max_batch_size=batch, num_kv_blocks=batch * 2 * 5)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sequences = [engine.make_sequence([5 + i] * length, params) for i in range(batch)]
    engine.prefill(sequences)
    engine.decode(sequences)
    with Cost() as cost:
        engine.decode(sequences)
    return cost


@pytest.mark.slow
@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_default_rung_of_a_cpu_copies_half_of_what_the_first_does_in_a_fifth_more_calls(
    parts, batch, length
):
    best, first = (cost_of_a_step(parts, rung, batch, length) for rung in (None, "dense"))
    assert best.n_bytes <= first.n_bytes / 2
    assert best.operators <= 1.2 * first.operators
