"""README.md and docs: commands that exist, links that lead somewhere, the notebooks' own questions."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from rosellm.errors import RoseError
from rosellm.lab import measure
from rosellm.lab.records import registry
from rosellm.lab.records.experiment import Experiment
from rosellm.lab.records.notebooks import ACTS
from rosellm.lab.running.page import question, title

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXTS["README.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A quick command of each kind, and options that make it small; the others are run by tests of their own.
RUN = {"benchmark_kv_append": ["--device", "cpu", "--batch-sizes", "4", "--repeats", "1"]}


def commands(start: str) -> list[str]:
    """Every line of a block without a language, and every inline command, that begins so."""
    found = []
    for text in TEXTS.values():
        blocks = "\n".join(
            block.replace("\\\n", " ") for language, block in BLOCK.findall(text) if not language
        )
        lines = [*blocks.splitlines(), *re.findall(r"`([^`\n]+)`", text)]
        found += [line.strip() for line in lines if line.startswith(start)]
    return list(dict.fromkeys(found))


class Parsed(Exception):
    """The options were taken, and nothing has run."""


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: object, **options: object) -> None:
        raise Parsed(parse(self, *given, **options))  # type: ignore[arg-type]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)


@pytest.mark.parametrize("command", commands("python -m rosellm"), ids=lambda one: one.split()[2])
def test_a_python_command_is_of_a_module_that_takes_its_options(command, monkeypatch):
    """``measure`` also knows every experiment, rung and workload that is named."""
    _python, _m, name, *arguments = shlex.split(command)
    module = importlib.import_module(name)
    stop_after_parsing(monkeypatch)
    with pytest.raises(Parsed) as parsed:
        importlib.import_module(f"{name}.__main__" if hasattr(module, "__path__") else name).main(arguments)
    monkeypatch.undo()
    if name == "rosellm.lab.measure":
        (given,) = parsed.value.args
        given.device = "cpu"
        given.options = [name for name in measure.OPTIONS if name in given]
        monkeypatch.setattr(Experiment, "check", lambda *_given: None)
        assert registry.plan(given)


@pytest.mark.parametrize("wrong", ["nonsense", "W3-nonsense", "W99"])
def test_a_name_that_measure_does_not_know_would_be_found(wrong, monkeypatch):
    stop_after_parsing(monkeypatch)
    with pytest.raises(Parsed) as parsed:
        importlib.import_module("rosellm.lab.measure").main(["--output", "x", "--device=cpu", *wrong.split()])
    monkeypatch.undo()
    (given,) = parsed.value.args
    with pytest.raises(RoseError, match=r"nonsense|W99"):
        registry.plan(argparse.Namespace(**vars(given), options=[]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_command_of_each_kind_runs_at_small_size(name, tmp_path, monkeypatch, capsys):
    (command,) = [one for one in commands("python -m rosellm") if f".{name} " in one]
    module, *arguments = shlex.split(command)[2:]
    output = ["--output", str(tmp_path)] if "--output" in arguments else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments, *RUN[name], *output])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert leaving.value.code == 0, capsys.readouterr().err


def test_every_make_target_that_is_named_exists():
    named = {line.split()[1] for line in commands("make ")}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"notebooks", "test", "test-all"} <= named
    assert named <= targets


@pytest.mark.parametrize(
    "pages",
    [("README.md", "docs/serving.md"), pytest.param(("docs/contributing.md",), marks=pytest.mark.slow)],
)
def test_the_python_examples_run_without_ray_and_the_compiler_of_pytorch(pages):
    """Their imports would take a second each."""
    blocks = [
        block for page in pages for language, block in BLOCK.findall(TEXTS[page]) if language == "python"
    ]
    code = "\n".join(blocks) + "\nimport sys\nassert not {'torch._dynamo', 'sympy', 'ray'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20


def test_every_page_with_python_examples_is_run():
    pages = {
        page for page, text in TEXTS.items() if "python" in [language for language, _ in BLOCK.findall(text)]
    }
    assert pages == {"README.md", "docs/serving.md", "docs/contributing.md"}


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_of_a_page_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#]+)\)", TEXTS[page]) + re.findall(r'src(?:set)?="([^"]+)"', TEXTS[page])
    folder = (ROOT / page).parent
    assert [link for link in links if not link.startswith("http") and not (folder / link).exists()] == []


def test_readme_is_read_to_the_end():
    assert len(README.splitlines()) <= 150


def test_readme_lists_every_notebook_with_its_own_question_in_its_act():
    listed = re.search(r"<!-- notebooks -->\n(.*)<!-- /notebooks -->", README, re.DOTALL)[1]
    wanted = ""
    for act in ACTS:
        wanted += f"\n**{act.name}.** {act.about}\n\n"
        for number in act.numbers:
            (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
            notebook = nbformat.read(path, 4)
            name = title(notebook).replace(" · ", " ", 1)
            wanted += f"- [{name}](notebooks/{path.name}): {question(notebook)}\n"
    assert listed == wanted
