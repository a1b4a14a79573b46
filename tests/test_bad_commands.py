"""What the commands cannot do is told in one line on stderr, with status 2; nothing is written or changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from rosellm.bench import (
    __main__ as bench,
    benchmark_kv_append,
    benchmark_rivals,
    benchmark_scheduler,
    benchmark_streaming,
)
from rosellm.lab import measure
from rosellm.lab.diagnose import __main__ as diagnose
from rosellm.lab.running import refresh_notebooks, run_notebooks
from tests.helpers import refusal

Command = Callable[[list[str]], int]
SMALL = "--device cpu --num-requests 2 --max-new-tokens 1 --warmup-runs 0 --repeat-runs 1"
NINES = "9" * 40
DAY = "and at most 86400000, a day"


def cases(main: Command, base: str, *rows: tuple[str | list[str], str], slow: bool = False) -> list:
    """Arguments after those of ``base``, and what the line must hold."""
    marks = [pytest.mark.slow] if slow else []
    return [
        pytest.param(main, [*base.split(), *(own.split() if isinstance(own, str) else own)], told,
                     id=told[:60], marks=marks)
        for own, told in rows
    ]  # fmt: skip


SCHEDULER = cases(
    benchmark_scheduler.main,
    SMALL,
    ("--cuda-graph", "--cuda-graph needs --paged-attn"),
    ("--rung dense --cuda-graph", "--rung names a whole recipe: leave out --paged-attn"),
    ("--rung nope", "rung 'nope' is unknown; use one of dense, paged"),
    ("--workload W4", "'W4' is run by benchmark_streaming; benchmark_scheduler runs W0, W1"),
    ("--workload W99", "'W99' is unknown; benchmark_scheduler runs W0, W1, W2, W3, W6"),
    ("--workload W7 --hf-model-id rose-tiny", "W7: 512 prompt tokens and 1 new ones exceed the model's"),
    ("--max-new-tokens 1000", "exceed the model's 512 positions"),
    ("--num-requests 9999999", "'9999999' is too large; use at most 1048576"),
    ("--num-kv-blocks 1 --block-size 4 --max-new-tokens 9", "ended after"),
    ("--num-kv-blocks 2147483647", "out of memory; ask for a smaller batch, fewer KV blocks"),
    ("--hf-model-id some-model --load-format dummy", "no shape is known for 'some-model'"),
    ("--hf-model-id .", "has no config.json"),
    ("--json file/x", "cannot write file/x: there is no folder file"),
    ("--prompt=", "prompt 0: the prompt is empty"),
    ("--prompt \udcff", "text '\\udcff' cannot be encoded"),
    ("--prompt-repeats 1,,4", "'' is not a whole number"),
    ("--json .", "cannot write .: it exists and is not a regular file"),
    ("--speculation eagle", "argument --speculation: invalid choice: 'eagle' (choose from"),
    ("--speculation ngram", "rung 'dense' cannot speculate; fused_append and later rungs can"),
    ("--paged-attn --speculation ngram --speculative-tokens 17", "'17' is too large; use at most 16"),
    ("--top-k -2", "--top-k: '-2' is not a whole number, 0 or more"),
    ("--shared-prefix-tokens 4", "--shared-prefix-tokens needs --prompt-tokens"),
    ("--max-new-tokens 9 --min-new-tokens 10", "the shortest length is 10, the longest 9"),
)  # fmt: skip
STREAMING = cases(
    benchmark_streaming.main,
    SMALL,
    ("--workload W0", "'W0' is run by benchmark_scheduler"),
    ("--request-rate 0", "'0' is not a number of requests a second above 0, or inf"),
    ("--submit-interval-ms 1e300", f"'1e300' is not a number of milliseconds, 0 or more {DAY}"),
    ("--request-rate 3 --submit-interval-ms 5", "not allowed with argument --request-rate"),
)  # fmt: skip
STEPS = cases(
    bench.main,
    "",
    ("", "the following arguments are required: NAME"),
    ("steps --rows 0", "argument --rows: '0' is not a whole number, 1 or more"),
    ("steps --device cpu --prompt-tokens 600", "max_model_len is 633; it must be"),
    ("steps --model nobody/knows --load-format dummy", "no shape is known for 'nobody/knows'"),
    ("tune --quantization int3", "argument --quantization: invalid choice: 'int3' (choose from"),
    ("tune --device cpu --quantization int8", "tuning needs one Hopper GPU, fp16 or bf16, the rung"),
    ("tune --json file", "file is no record of tuned models: json.decoder.JSONDecodeError"),
)
RIVALS = cases(
    benchmark_rivals.main,
    "--device cpu",
    ("--workloads W1", "required: --rival"),
    ("--rival sglang --workloads W1", "'sglang' is unknown; use vllm, transformers, rosellm"),
    ("--rival rosellm --workloads W1,W99", "'W99' is unknown; use W0, W1"),
    ("--rival transformers --workloads W1,W7", "W7: 512 prompt tokens and 128 new ones exceed the"),
    ("--rival rosellm --workloads W1 --output file", "File exists: 'file'"),
)  # fmt: skip
KV_APPEND = cases(
    benchmark_kv_append.main,
    "--device cpu",
    ("--batch-sizes 128,x", "'x' is not a whole number"),
    (f"--batch-sizes 8,{NINES}", "too large; use at most 1099511627776"),
    ("--batch-sizes 100000000000 --repeats 1", "out of memory"),
    ("--json file/record.json", "there is no folder file"),
)
LAB = [
    *cases(
        measure.main,
        "--device cpu --output out --model rose-tiny",
        ("--repeats 0", "--repeats: '0' is not a whole number, 1 or more"),
        ("W0 --model gpt5", "for 'gpt5'"),
        slow=True,
    ),
    *cases(
        diagnose.main,
        "--device cpu",
        (f"--batch {NINES}", "too large; use at most 4096"),
        ("--context 495", "512 positions; use a context of at most 494"),
        ("--rung paged --transformers", "which --transformers does not run; give only one of them"),
        ("--model gpt5 --transformers", "use 'rose-tiny', a local folder"),
        slow=True,
    ),
    *cases(
        refresh_notebooks.main,
        "--without-png --notebooks notebooks",
        ("--timeout nan", "timeout must be above 0 and finite, not nan"),
        ("--select 99", "no notebook is called '99': there are 01_dense"),
        slow=True,
    ),
    *cases(
        run_notebooks.main,
        "--notebooks notebooks --output out",
        ("--timeout nan", "timeout must be above 0 and finite, not nan"),
        ("--notebooks broken --parameters batch=1", "broken/01.ipynb cannot be read as a notebook"),
        ("--parameters batch=x", "batch='x': it takes a value like 8"),
        (["--parameters", "lengths=[2,x]"], "lengths=[2, 'x']: it takes a value like [2, 40]"),
        slow=True,
    ),
]  # fmt: skip


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
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    return tmp_path


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("main", "arguments", "told"), SCHEDULER + STREAMING + STEPS + RIVALS + KV_APPEND + LAB
)
def test_a_command_tells_bad_input_in_one_line_and_leaves_nothing(main, arguments, told, place, capsys):
    before = contents(place)
    assert told in refusal(main, arguments, capsys)
    assert contents(place) == before


@pytest.mark.slow
def test_a_process_ends_with_status_2_and_one_line() -> None:
    command = [sys.executable, "-m", "rosellm.rosetrainer.train", "--batch-size", "many"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=60)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("error: ") and "many" in line
