"""Check that an engine with replaced kernels generates the tokens of its rung; count the kernels' calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rosellm.errors import describe
from rosellm.lab.records.bench import first_difference, forced_logits, make_prompts
from rosellm.lab.trying.called_by import ROLES
from rosellm.lab.trying.check_kernel import KernelError
from rosellm.ladder.rungs import TritonAppend
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.sampling import SamplingParams

CLOSEST_CALL = 1e-3  # minimum gap of two fp32 logits that another order of summation cannot reverse
NEW_TOKENS, BLOCK_SIZE = 4, 16
UNEQUAL, EQUAL = [2, 14, 17], [15, 15, 15]  # lengths of prompts; some cross block boundaries
LONG = 300  # tokens of a prompt, enough for several tiles of keys
GREEDY = {"temperature": 0.0}
SAMPLED: list[dict[str, Any]] = [GREEDY, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2}]
Replaced = Mapping[str, Callable[..., Any]]
Tokens = list[list[int]]


class Counted:
    """A wrapper of a kernel that counts the calls and adds the kernel's name to errors."""

    def __init__(self, name: str, kernel: Callable[..., Any]) -> None:
        self.name, self.kernel, self.calls = name, kernel, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        try:
            return self.kernel(*arguments, **named)
        except Exception as error:
            raise KernelError(
                f"{self.name} raised in the engine, in call {self.calls}: {describe(error)}"
            ) from error


def same_tokens(
    name: str,
    base: str,
    ours: Kernels,
    replaced: Replaced,
    models: Mapping[str, Transformer],
    context: int = LONG,
) -> dict[str, dict[str, int]]:
    """Compare the tokens of the base rung with and without replaced kernels; count the kernels' calls.

    name: the name of the rung with replaced kernels, for errors.
    base: the base rung.
    ours: the kernels of the base rung.
    replaced: the reader's kernels, by name.
    models: the models to run, by name.
    context: number of tokens of a long prompt, cut to what the model allows.

    Each model runs prompts of unequal lengths, greedily. The first model also runs prompts of equal length,
    partly sampled, and the long prompt if a kernel reads or writes the cache. Returns the number of calls by
    model and kernel. Raises KernelError for different tokens, or a kernel that the first model never calls.
    """
    calls: dict[str, dict[str, int]] = {}
    for model_name, model in models.items():
        counted: dict[str, Any] = {one: Counted(one, kernel) for one, kernel in replaced.items()}
        mine = replace(ours, **counted)
        runs = [(UNEQUAL, [GREEDY])]
        if not calls:  # only once: an interpreted run takes seconds
            runs.append((EQUAL, SAMPLED))
            if any(ROLES[one].name in ("attention", "append") for one in replaced):
                runs.append(([min(context, model.config.n_positions - NEW_TOKENS)], [GREEDY]))
        for lengths, settings in runs:
            prompts = make_prompts(len(lengths), lengths, model.config.vocab_size, seed=1)
            expected, found = (_generate(model, base, one, prompts, settings) for one in (ours, mine))
            is_greedy = settings == [GREEDY]
            if expected != found and not (is_greedy and _is_tie(model, base, ours, prompts, expected, found)):
                raise KernelError(f"{name} on {model_name}: {_difference(base, expected, found)}")
        calls[model_name] = {one: kernel.calls for one, kernel in counted.items()}
    _check_called(base, calls)
    return calls


def _check_called(base: str, calls: Mapping[str, Mapping[str, int]]) -> None:
    """Raise KernelError if the first model never calls one of the kernels."""
    first = next(iter(calls))
    for kernel, n in calls[first].items():
        if not n:
            others = [model for model in calls if calls[model][kernel]]
            hint = f"; it does with model={others[0]!r}" if others else ""
            run = f"{first}, in prompts and steps of 3 sequences"
            raise KernelError(f"{base} never calls {kernel} with {run}{hint}")


def _generate(
    model: Transformer, base: str, kernels: Kernels, prompts: Tokens, settings: list[dict[str, Any]]
) -> Tokens:
    """Return the new tokens of each prompt.

    settings: sampling parameters; requests cycle through them.
    """
    longest = max(map(len, prompts)) + NEW_TOKENS
    engine = Engine(
        model,
        recipe=base,
        max_batch_size=len(prompts),
        max_model_len=longest,
        num_kv_blocks=len(prompts) * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        kernels=kernels,
        warm_up=False,
    )
    if isinstance(engine.step, TritonAppend):
        engine.step.append_from = 1
    params = [SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **one) for one in settings]
    sequences = [engine.make_sequence(p, params[i % len(params)]) for i, p in enumerate(prompts)]
    engine.prefill(sequences)
    for _ in range(NEW_TOKENS - 1):
        engine.decode(sequences)
    return [sequence.output for sequence in sequences]


def _is_tie(
    model: Transformer, base: str, ours: Kernels, prompts: Tokens, expected: Tokens, found: Tokens
) -> bool:
    """Return whether two greedy runs differ first where the best two logits of the base rung nearly tie.

    expected, found: tokens of the base rung, and of the rung with replaced kernels.
    """
    logits = forced_logits(model, base, prompts, expected, gate_from=1, kernels=ours)
    parted = first_difference(logits, expected, found)
    return parted is not None and parted["logit_gap"] < CLOSEST_CALL


def _difference(base: str, expected: Tokens, found: Tokens) -> str:
    places = ((step, row) for step in range(NEW_TOKENS) for row in range(len(expected)))
    step, row = next((s, r) for s, r in places if expected[r][s] != found[r][s])
    return (
        f"new token {step} of sequence {row} is {found[row][step]}, {base}'s is {expected[row][step]}; "
        "the kernel passes its own check, so look for what it keeps between calls"
    )
