"""README.md is true: its computed parts are up to date and its commands run."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import deterministic as deterministic_settings

from rosellm.errors import RoseError
from rosellm.lab.records.machines import find_machines
from rosellm.lab.records.model_ladder import by_role
from rosellm.lab.records.records import REFERENCE, Results
from rosellm.lab.running import readme
from tests.ledgers import ROWS, ledger_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SMALL = ["--hf-model-id", "rose-tiny", "--load-format", "auto", "--device", "cpu", "--num-requests", "2"]
SHIPPED = ["--model", "rose-tiny", "--load-format", "auto", "--device", "cpu"]
SMALL += ["--max-new-tokens", "4", "--warmup-runs", "0", "--repeat-runs", "1"]


def python_commands() -> list[list[str]]:
    """All but those that need a cluster: ``test_sweep_on_ray`` runs them."""
    blocks = "\n".join(block.replace("\\\n", " ") for language, block in BLOCKS if not language)
    inline = re.findall(r"`(python -m [^`]+)`", TEXT)
    lines = [line for line in [*blocks.splitlines(), *inline] if line.startswith("python -m ")]
    return [shlex.split(line) for line in lines if "--cluster" not in line]


def made_small(command: list[str], folder: Path) -> list[str]:
    """The same command at a size for a test, on a CPU, writing into ``folder`` alone."""
    module = command[2].rpartition(".")[2]
    overrides = {
        "benchmark_scheduler": SMALL,
        "benchmark_streaming": SMALL,
        "benchmark_kv_append": ["--device", "cpu", "--batch-sizes", "4", "--repeats", "1"],
        "measure": [
            "--device",
            "cpu",
            "--output",
            str(folder),
            "--workloads",
            "",
            "--experiments",
            "bookkeeping",
        ],
        "benchmark_rivals": [*SMALL, "--workloads", "W1", "--output", str(folder)],
        "readme": ["--check"],
        "diagnose": ["--device", "cpu", "--batch", "2", "--context", "20"],
        "model_runs": [
            *("--model", "rose-tiny-qwen3", "--load-format", "auto", "--device", "cpu", "--repeats", "1"),
            *("--workloads", "TTFT64", "--ladder", "", "--ledgers", "", "--output", str(folder)),
        ],
        "first_request": [*SHIPPED, "--output", str(folder)],
        "prefill_times": [*SHIPPED, "--repeats", "1", "--output", str(folder)],
        "user_calls": [*SHIPPED, "--repeats", "1", "--workloads", "W8", "--output", str(folder)],
        "versions": [
            *SHIPPED,
            "--old",
            "HEAD",
            "--repeats",
            "1",
            "--workloads",
            "W1",
            "--output",
            str(folder),
        ],
        "arrivals": [*SHIPPED, "--seconds", "1", "--output", str(folder)],
        "one_pass": [*SHIPPED, "--repeats", "1", "--output", str(folder)],
        "loading_record": ["--model", "rose-tiny-qwen3", "--device", "cpu", "--output", str(folder)],
        "prompt_attention": [
            *("--device", "cpu", "--lengths", "64", "--tokens", "128", "--repeats", "1"),
            *("--output", str(folder)),
        ],
        "sampling_steps": [
            *("--model", "rose-tiny", "--load-format", "auto", "--device", "cpu", "--batches", "2"),
            *("--context", "20", "--repeats", "1", "--output", str(folder)),
        ],
        "all_reduce": [
            *("--device", "cpu", "--ranks", "2", "--sizes-kb", "8", "--repeats", "1"),
            *("--output", str(folder)),
        ],
        "two_gpus": [
            *("--model", "rose-tiny", "--load-format", "auto", "--device", "cpu", "--repeats", "1"),
            *("--workloads", "TTFT64", "--replica-workloads", "", "--output", str(folder)),
        ],
        "train": [
            "--smoke",
            "--epochs",
            "0.1",
            "--device",
            "cpu",
            "--output",
            str(folder / "m"),
            "--json",
            str(folder / "r.json"),
        ],
    }
    return [*command[2:], *overrides[module]]


def test_the_computed_parts_are_up_to_date():
    assert not readme.stale_files(), "run python -m rosellm.lab.running.readme"


def test_a_step_is_told_with_its_floor_and_the_roles_of_a_tenth_or_more_above_it(tmp_path):
    for name, record in (("D1", {}), ("ledgers", {"figures": {"D8": ledger_of(ROWS).as_dict()}})):
        (tmp_path / "Qwen3-0.6B").mkdir(exist_ok=True)
        (tmp_path / "Qwen3-0.6B" / f"{name}.json").write_text(json.dumps(record))
    *_, told = readme.bounds_table([Results(tmp_path)]).splitlines()
    ledger = ledger_of(ROWS)
    above = {role: time.us - (time.floor_us or 0) for role, time in by_role(ledger).items()}
    step, rest = re.fullmatch(r"\| D8 \| \*\*([\d,]+)\*\* \([\d,]+; (.*)\) \|", told).groups()
    assert int(step) == round(ledger.step_us)
    named = dict(one.rsplit(" ", 1) for one in rest.split(", "))
    assert list(map(int, named.values())) == sorted(map(int, named.values()), reverse=True)
    assert "products" in named
    tenth = (ledger.step_us - ledger.floor_us) / 10
    assert sorted(map(int, named.values())) == sorted(round(us) for us in above.values() if us >= tenth)


def test_calls_of_another_model_are_refused_and_the_reason_is_told_below_the_table(tmp_path):
    for name, model in ((REFERENCE, "gpt2"), ("mine", "rose-tiny")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "user_calls.json").write_text(json.dumps({"model": model, "figures": {}}))
    told = readme.calls_table(find_machines("mine", tmp_path)).splitlines()
    assert told[2:] == ["", "Recorded with another model (rose-tiny, not gpt2), mine."]


@pytest.fixture
def in_the_checkout(monkeypatch):
    """A command's own changes of the process are taken back."""
    deterministic, fill = (
        torch.are_deterministic_algorithms_enabled(),
        deterministic_settings.fill_uninitialized_memory,
    )
    monkeypatch.chdir(ROOT)
    yield
    torch.use_deterministic_algorithms(deterministic)
    deterministic_settings.fill_uninitialized_memory = fill


@pytest.mark.parametrize("command", python_commands(), ids=lambda command: command[2].rpartition(".")[2])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_python_command_runs(command, tmp_path, monkeypatch, capsys, in_the_checkout):
    """In this process, as ``python -m`` runs a module."""
    module, *arguments = made_small(command, tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert leaving.value.code == 0, capsys.readouterr().err


def test_the_python_examples_run_without_ray_and_the_compiler_of_pytorch():
    """Whose import takes a second, and sympy's, which it needs, half of one; Ray's takes another."""
    code = "\n".join(block for language, block in BLOCKS if language == "python")
    if torch.cuda.device_count() == 1:
        code = code.replace("tensor_parallel_size=2", 'tensor_parallel_size=2, device="cpu"')
    code += "\nimport sys\nassert not {'torch._dynamo', 'sympy', 'ray'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT) + re.findall(r'src(?:set)?="([^"]+)"', TEXT)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_missing_section_is_told():
    with pytest.raises(RoseError, match="<!-- results -->"):
        readme.updated("<!-- record: nvidia-h200 -->\n<!-- notebooks -->\n<!-- /notebooks -->")
