"""Whatever stands in a checkpoint's files, it loads and works, or is refused in one line; so are commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import nbformat
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from nbformat.v4 import new_code_cell, new_notebook

from rosellm import SamplingParams
from rosellm.bench import benchmark_kv_append, benchmark_rivals, benchmark_scheduler, benchmark_streaming
from rosellm.errors import RoseError
from rosellm.lab import measure
from rosellm.lab.diagnose import __main__ as diagnose
from rosellm.lab.running import refresh_notebooks, run_notebooks
from rosellm.models.tokenizer import load_tokenizer
from rosellm.rosetrainer import train
from tests.test_bad_checkpoints import spoilt, tokenizer  # noqa: F401
from tests.test_bad_input import (  # noqa: F401
    ROOT,
    SHAPE,
    asked,
    checkpoint,
    folder,
    llm,
    loaded,
    modern_checkpoint,
    params,
)

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
    max_examples=250, deadline=2000, derandomize=True, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture
def lean() -> Iterator[None]:
    """At most half a GiB more than before."""
    before = getrusage(RUSAGE_SELF).ru_maxrss
    yield
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 1 << 19


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


TOKENIZER_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "normalized": True},
    "unk_token": "<|endoftext|>",
    "add_prefix_space": False,
    "model_max_length": 1024,
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    "additional_special_tokens": ["x"],
}


@settings(FUZZED, max_examples=100)
@given(data=st.data())
def test_whatever_stands_in_gpt2s_older_files_encodes_and_streams_or_is_refused(
    checkpoint: Path, folder: Path, lean: None, data: st.DataObject
) -> None:
    """vocab.json, merges.txt, tokenizer_config.json: without a tokenizer.json, `transformers` reads them."""
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    files = {"vocab.json": model["vocab"], "tokenizer_config.json": TOKENIZER_CONFIG}
    spoilt = data.draw(st.sampled_from([*files, None]))
    for name, good in files.items():
        value = data.draw(mutations(good)) if name == spoilt else good
        (folder / name).write_text(json.dumps(value))
    (folder / "merges.txt").write_text("".join(f"{' '.join(merge)}\n" for merge in model["merges"]))
    (folder / "tokenizer.json").unlink(missing_ok=True)
    spells(folder)
    if spoilt is None:
        load_tokenizer(folder, SHAPE)


@FUZZED
@given(
    cut=st.integers(0, 3200), flips=st.lists(st.tuples(st.integers(0, 3200), st.integers(0, 255)), max_size=4)
)
def test_bytes_that_changed_in_tokenizer_json_are_read_or_refused(
    checkpoint: Path, folder: Path, lean: None, cut: int, flips: list[tuple[int, int]]
) -> None:
    content = bytearray((checkpoint / "tokenizer.json").read_bytes())
    for place, byte in flips:
        content[place] = byte
    (folder / "tokenizer.json").write_bytes(content[:cut] if not flips else content)
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


# Commands


@dataclass(frozen=True)
class Asked:
    """A command line, and what its one line on stderr must hold."""

    main: Callable[[list[str]], int]
    arguments: list[str]
    words: tuple[str, ...]


def command(main: Callable[[list[str]], int], base: str = "") -> Callable[..., Any]:
    def asked(arguments: str | list[str], *words: str):
        own = arguments.split() if isinstance(arguments, str) else arguments
        return pytest.param(Asked(main, [*base.split(), *own], words), id=" ".join(words)[:60])

    return asked


SMALL = "--device cpu --num-requests 2 --max-new-tokens 1 --warmup-runs 0 --repeat-runs 1"
scheduler = command(benchmark_scheduler.main, SMALL)
streaming = command(benchmark_streaming.main, SMALL)
kv_append = command(benchmark_kv_append.main, "--device cpu")
rivals = command(benchmark_rivals.main, "--device cpu")
training = command(train.main, "--smoke --device cpu --output out")
measuring = command(measure.main, "--device cpu --output out --model rose-tiny --workloads=")
diagnosing = command(diagnose.main, "--device cpu")
notebooks = command(run_notebooks.main, "--notebooks notebooks --output out")
refresh = command(refresh_notebooks.main, "--without-png --notebooks notebooks")
nines = "9" * 40

COMMANDS = [
    scheduler("--num-requests +-5", "--num-requests", "'+-5' is not a whole number, 1 or more"),
    scheduler("--num-requests 9999999", "'9999999' is too large; use at most 1048576"),
    scheduler(f"--max-batch-size {nines}", "--max-batch-size", "too large; use at most 2147483647"),
    scheduler(f"--block-size {2**70}", "--block-size", "too large; use at most 1048576"),
    scheduler("--num-kv-blocks 2147483647", "out of memory; ask for a smaller batch, fewer KV blocks"),
    scheduler("--prompt \udcff", "text '\\udcff' cannot be encoded"),
    scheduler(f"--hf-model-id {'a' * 5000}", "model 'aaa", "use 'rose-tiny', a local folder"),
    scheduler("--hf-model-id .", "has no config.json"),
    scheduler(f"--json {'x' * 5000}", "File name too long"),
    scheduler("--json file/x", "cannot write file/x: there is no folder file"),
    scheduler("--profile .", "cannot write .", "not a regular file"),
    scheduler("--workload=", "workload '' is unknown; benchmark_scheduler runs W0"),
    scheduler("--top-k -2", "--top-k: '-2' is not a whole number, -1 or more"),
    scheduler("stray", "unrecognized arguments: stray"),
    streaming("--submit-interval-ms 1e300", "'1e300'", "at most 86400000, a day"),
    streaming("--prompt \udcff --tokenize-workers 1", "text '\\udcff' cannot be encoded"),
    streaming("--trace file", "file: the header is kept; it must name seconds, prompt_tokens, new_tokens"),
    kv_append(f"--batch-sizes 8,{nines}", "--batch-sizes", "too large; use at most 1099511627776"),
    kv_append("--head-dim 2147483647 --num-heads 2147483647", "out of memory"),
    rivals("--rival=", "'' is unknown; use vllm, transformers, rosellm"),
    rivals("--rival rosellm --workloads W1 --output file/x", "Not a directory: 'file/x'"),
    training("--epochs 1e308", "epochs is 1e+308; it must be at most 1000000"),
    training(f"--batch-size {10**12}", "batch_size is 1000000000000; it must be at most 65536"),
    training("--json .", "record '.' is not a file name"),
    measuring("--repeats 0", "--repeats: '0' is not a whole number, 1 or more"),
    measuring("--device tpu", "invalid choice: 'tpu'", "'cuda', 'cpu'"),
    measuring("--load-format gguf", "invalid choice: 'gguf'", "'auto', 'dummy'"),
    measuring("--output file", "File exists: 'file'"),
    measuring(["W0", "--model", "gpt5"], "for 'gpt5'", "rose-tiny"),
    diagnosing(f"--batch {nines}", "--batch", "too large; use at most 4096"),
    diagnosing("--context 489", "context 489", "512 positions; use a context of at most 488"),
    diagnosing("--rung paged --transformers", "which --transformers does not run; give only one of them"),
    diagnosing("--model gpt5 --transformers", "model 'gpt5'", "use 'rose-tiny', a local folder"),
    notebooks("--workers x", "--workers: 'x' is not a whole number, 1 or more"),
    notebooks("--timeout nan", "timeout must be above 0 and finite, not nan"),
    notebooks("--output file", "output 'file' cannot be a folder: File exists"),
    notebooks("--select 99", "no notebook is called '99': there are 01_dense"),
    notebooks("--notebooks broken --parameters batch=1", "broken/01.ipynb cannot be read as a notebook"),
    refresh("--timeout nan", "timeout must be above 0 and finite, not nan"),
    refresh("--select 99", "no notebook is called '99': there are 01_dense"),
]

PARAMETERS = {
    "batch=x": ("batch='x'", "a value like 8"),
    "batch=1.5": ("batch=1.5", "a value like 8"),
    "quick=1": ("quick=1", "a value like True"),
    "rate=fast": ("rate='fast'", "a value like 0.5"),
    "lengths=[2,x]": ("lengths=[2, 'x']", "a value like [2, 40]"),
    "rung=7": ("rung=7", "a value like 'dense'"),
    "rungs=dense": ("no parameter 'rungs'", "batch, lengths, quick, rate, rung"),
    "batch": ("name=value", "'batch'"),
    f"batch={'[' * 9000}": ("'batch'", "cannot be read as YAML"),
}
COMMANDS += [notebooks(["--parameters", text], *words) for text, words in PARAMETERS.items()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in: a file, notebooks, one that is none."""
    for name in ("notebooks", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "broken/01.ipynb").write_text('{"cells"')
    cell = new_code_cell("batch = 8\nlengths = [2, 40]\nquick = True\nrate = 0.5  # a share\nrung = 'dense'")
    cell.metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "notebooks/01_dense.ipynb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("one", COMMANDS)
def test_a_command_tells_bad_input_in_one_line_and_leaves_nothing(
    one: Asked, place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    try:
        status = one.main(one.arguments)
    except SystemExit as leaving:
        status = leaving.code
    [line] = capsys.readouterr().err.splitlines()
    assert status == 2
    assert all(word in line for word in one.words), line
    after = {path: path.is_file() and path.read_bytes() for path in place.rglob("*") if path.name != "out"}
    assert after == before


@pytest.mark.slow
def test_a_process_ends_with_status_2_and_one_line() -> None:
    command = [sys.executable, "-m", "rosellm.rosetrainer.train", "--batch-size", "many"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("error: ") and "many" in line
