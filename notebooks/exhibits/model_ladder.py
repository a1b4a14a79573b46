"""The ladder on modern models: recorded steps and ledgers, and predictions from GPT-2's steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rosellm.bench.workloads import MODEL_WORKLOADS
from rosellm.errors import RecipeError
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.machines import name_of
from rosellm.lab.records.records import RecordError, Results, floor_us, modern_rivals, read_us, short_name
from rosellm.lab.records.step_time import StepTimes, recorded_steps, step_shape
from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import LADDER

RIVAL = load_exhibit("models").RIVAL
TWINS = {"D1": "W0", "D64": "W2"}  # equal batch and cached tokens; W0 and W2 use GPT-2 small
GPT2, BYTES = KNOWN_SHAPES["gpt2"], 2


def gpt2_ladder(results: Results, workload: str) -> dict[str, float]:
    """Return rung → µs of GPT-2's recorded step at the batch and context of ``workload``, D1 or D64."""
    return _us(recorded_steps(results, TWINS[workload]))


def recorded_ladder(results: Results, model: str, workload: str) -> dict[str, float]:
    """Return rung → µs of a model's recorded step, in the ladder's order. Raises ``RecordError``."""
    return _us(_model_steps(results, model, workload))


def twin_ladders(results: Results, model: str) -> dict[str, dict[str, float]]:
    """Return both models' ladders in µs per step, named as in :func:`twin_steps`. Raises ``RecordError``."""
    return {name: _us(steps) for name, steps in twin_steps(results, model).items()}


def twin_steps(results: Results, model: str) -> dict[str, dict[str, StepTimes]]:
    """Return both models' steps at each of ``TWINS``: ``GPT-2, W0``, ``Qwen3, D1``, …

    Raises ``RecordError``.
    """
    family, steps = model.partition("-")[0], {}
    for workload, twin in TWINS.items():
        steps[f"GPT-2, {twin}"] = recorded_steps(results, twin)
        steps[f"{family}, {workload}"] = _model_steps(results, model, workload)
    return steps


def _model_steps(results: Results, model: str, workload: str) -> dict[str, StepTimes]:
    steps = recorded_steps(_of(results, model, f"steps-{workload}"), workload)
    return {rung: steps[rung] for rung in LADDER if rung in steps}


def _us(steps: dict[str, StepTimes]) -> dict[str, float]:
    return {rung: times.us for rung, times in steps.items()}


def speeds_beside(others: Sequence[Results], model: str, workload: str) -> dict[str, dict[str, float]]:
    """Return machine → rung → tokens per second of a model's recorded step; {} without records."""
    sequences = step_shape(MODEL_WORKLOADS[workload])[0]
    beside: dict[str, dict[str, float]] = {}
    for results in others:
        steps: dict[str, float] = {}
        with suppress(RecordError):
            steps = recorded_ladder(results, model, workload)
        beside[name_of(results)] = {rung: sequences / us * 1e6 for rung, us in steps.items()}
    return beside


def step_floor_us(results: Results, arch: Arch, workload: str) -> float:
    """Return µs to read a model's weights and a mid-run step's cached keys and values once, in 16 bits."""
    batch, context = step_shape(MODEL_WORKLOADS[workload])
    cached = batch * context * arch.kv_bytes_per_token(BYTES)
    return read_us(results, arch.n_step_parameters * BYTES + cached)


def foretold_ladder(results: Results, arch: Arch, workload: str) -> dict[str, float]:
    """Predict rung → µs of a model's step from GPT-2's: time above the floor scales with the layers alone."""
    own, theirs = step_floor_us(results, arch, workload), floor_us(results, TWINS[workload])
    layers = arch.n_layers / GPT2.n_layers
    steps = gpt2_ladder(results, workload)
    return {rung: own + layers * (us - theirs) for rung, us in steps.items() if _serves(rung, arch)}


def _serves(rung: str, arch: Arch) -> bool:
    try:
        LADDER[rung].check_serves(arch)
    except RecipeError:
        return False
    return True


def mean_step_us(results: Results, model: str, workload: str) -> float:
    """Return the mean µs per decode step of a model's recorded whole run. Raises ``RecordError``."""
    (run,) = Results(results.folder / model).load(workload)["results"].values()
    return run["medians"]["decode_step_mean_s"] * 1e6


def rest_a_layer(results: Results, model: str, arch: Arch, workload: str) -> tuple[float, float]:
    """Return µs per layer above the floor: ours, and the rival's, whose step is implied by its whole run.

    Raises ``RecordError``.
    """
    tokens_a_second = modern_rivals(model).get(RIVAL, {}).get(workload)
    if tokens_a_second is None:
        raise RecordError(f"no {workload} of {RIVAL} with {model} is recorded")
    theirs = step_shape(MODEL_WORKLOADS[workload])[0] / tokens_a_second * 1e6
    ours, least = mean_step_us(results, model, workload), step_floor_us(results, arch, workload)
    return (ours - least) / arch.n_layers, (theirs - least) / arch.n_layers


def recorded_ledgers(results: Results, model: str) -> dict[str, Ledger]:
    """Return workload → ledger, without those that the profiler disturbed. Raises ``RecordError``."""
    figures = _of(results, model, "ledgers").load("ledgers")["figures"]
    ledgers = {workload: Ledger.from_dict(one) for workload, one in figures.items()}
    return {workload: one for workload, one in ledgers.items() if not one.is_disturbed}


def _of(results: Results, model: str, record: str) -> Results:
    """Return the model's records. Raises ``RecordError`` unless ``record`` is among them."""
    own = Results(results.folder / model)
    if record not in own.names():
        (full,) = [name for name in KNOWN_SHAPES if short_name(name) == model]
        command = f"python -m rosellm.lab.measure {record} --model {full} --output DIR"
        raise RecordError(f"{model} has no record {record!r} yet; on its GPU make it with: {command}")
    return own
