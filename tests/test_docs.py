"""README.md and docs: commands that exist, links that lead somewhere, the notebooks' own questions."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

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


def test_every_make_target_that_is_named_exists():
    named = {line.split()[1] for line in commands("make ")}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"notebooks", "test", "test-all"} <= named
    assert named <= targets


EXAMPLES = {
    page: blocks
    for page, text in TEXTS.items()
    if (blocks := [block for language, block in BLOCK.findall(text) if language == "python"])
}


@pytest.mark.parametrize(
    "pages",
    [
        [page for page in EXAMPLES if page != "docs/contributing.md"],
        pytest.param(["docs/contributing.md"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_python_examples_run_without_ray_and_the_compiler_of_pytorch(pages):
    """Their imports would take a second each."""
    code = "".join(f"exec({chr(10).join(EXAMPLES[page])!r}, {{'__name__': '__main__'}})\n" for page in pages)
    code += "import sys\nassert not {'torch._dynamo', 'sympy', 'ray'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_of_a_page_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#]+)\)", TEXTS[page]) + re.findall(r'src(?:set)?="([^"]+)"', TEXTS[page])
    folder = (ROOT / page).parent
    assert [link for link in links if not link.startswith("http") and not (folder / link).exists()] == []


def test_readme_is_short_and_lists_every_notebook_with_its_own_question_in_its_act():
    assert len(README.splitlines()) <= 150
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
