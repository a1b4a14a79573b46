"""Whatever stands in a checkpoint's files, it loads and works, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rosellm import SamplingParams
from rosellm.errors import RoseError
from rosellm.models.families.table import FAMILIES, read_arch, write_arch
from rosellm.models.tokenizer import load_tokenizer
from tests.helpers import CPU
from tests.models.family_checks import sizes
from tests.test_bad_input import SHAPE, checkpoint, folder, loaded  # noqa: F401

INTEGERS = [0, 1, -1, 2, 3, 31, 64, 65, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**400]
REALS = [0.0, -1.5, 1.5, 1e308, float("inf"), float("nan")]
OTHERS = [None, True, False, "", "gpt2", "gelu", "2", "\0", "\ud800", "é" * 9, "BPE", "ByteLevel", [], {}]
SCALARS = st.sampled_from(INTEGERS) | st.sampled_from(REALS) | st.sampled_from(OTHERS)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(["type", "a"]), SCALARS)
PLACES = st.integers(0, 3000)
WAYS = st.sampled_from(["replace"] * 5 + ["delete", "double", "rename"])


def places(value: object) -> list[tuple[dict | list, str | int]]:
    """Where in a JSON value there is another; of a long list or vocabulary, the beginning."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in list(inside)[:20] for place in ((value, key), *places(inner)[:60])]


@st.composite
def mutations(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """``good`` with one or a few places changed."""
    bad = deepcopy(good)
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        container, key = draw(st.sampled_from(places(bad)))
        change(container, key, draw(WAYS), draw(VALUES))
    return bad


def change(container: dict | list, key: str | int, way: str, value: object) -> None:
    if way == "replace":
        container[key] = value
    elif way == "delete":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, deepcopy(container[key]) if way == "double" else value)
    elif way == "rename":
        container[f"{key}_"] = container.pop(key)
    else:
        container[f"{key}"] = [deepcopy(container[key])] * 2


FUZZED = settings(
    max_examples=150, deadline=2000, derandomize=True, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture
def lean() -> Iterator[None]:
    """At most half a GiB more than before."""
    before = getrusage(RUSAGE_SELF).ru_maxrss
    yield
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 1 << 19


SCALED = {"factor": 4.0, "original_max_position_embeddings": 32}
ROPES = [
    {},
    {"rope_parameters": {"rope_type": "yarn"} | SCALED},
    {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
]
WINDOW = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}
CONFIGS = [
    sizes(family) | {"model_type": family, "dtype": "bfloat16", "layer_types": None} | WINDOW | rope
    for family in FAMILIES
    for rope in ROPES
]


@settings(FUZZED, max_examples=250, deadline=None)
@given(config=st.sampled_from(CONFIGS).flatmap(mutations))
def test_whatever_stands_in_a_config_is_a_shape_with_finite_angles_or_refused(config: dict) -> None:
    try:
        arch = read_arch(config)
    except RoseError as error:
        assert "\n" not in str(error)
        return
    assert read_arch(json.loads(json.dumps(write_arch(arch)))) == arch and arch.n_parameters > 0
    if arch.rope is not None and arch.head_dim <= 4096:
        assert arch.rope.table(4, arch.head_dim, CPU).isfinite().all()


@FUZZED
@given(data=st.data())
def test_whatever_stands_in_config_json_loads_and_runs_or_is_refused(
    checkpoint: Path, folder: Path, lean: None, data: st.DataObject
) -> None:
    good = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data.draw(mutations(good))))
    try:
        llm = loaded(folder, rung=None)
    except RoseError as error:
        assert "\n" not in str(error)
        return
    params = SamplingParams(temperature=0.0, max_tokens=3)
    outputs = llm.generate([[1], [2, 3]], params, use_tqdm=False)
    assert all(1 <= len(result.outputs[0].token_ids) <= 3 for result in outputs)


@FUZZED
@given(data=st.data())
def test_whatever_stands_in_tokenizer_json_encodes_and_streams_or_is_refused(
    checkpoint: Path, folder: Path, lean: None, data: st.DataObject
) -> None:
    good = json.loads((checkpoint / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data.draw(mutations(good))))
    spells(folder)


def spells(folder: Path) -> None:
    """Whatever was loaded gives ids of the model, and their text in pieces."""
    try:
        tokenizer = load_tokenizer(folder, SHAPE)
        ids = tokenizer.encode("hello wörld <|endoftext|>")
    except RoseError as error:
        assert "\n" not in str(error)
        return
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in [*ids, 299]]
    assert all(0 <= token_id < 300 for token_id in ids)
    assert isinstance("".join(pieces) + stream.finish() + tokenizer.decode(ids), str)
