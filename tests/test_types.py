"""The package's types as its users' tools see them: an example, and an editable install."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

import rosellm

ROOT = Path(__file__).parents[1]
EXAMPLE = """from rosellm import LLM, SamplingParams

llm = LLM()
for output in llm.generate(["import os\\n", "def main("], SamplingParams(temperature=0, max_tokens=24)):
    print(output.outputs[0].text)
"""
OTHER_PROMPTS = """
import numpy as np

llm.generate(("a", "b"))
llm.generate(np.array([1, 2]), [SamplingParams()])
llm.generate(str(n) for n in range(3))
llm.generate([[1, 2], [3, 4]], use_tqdm=False)
ids: list[int] = llm.generate("a")[0].outputs[0].token_ids
"""
WRONG = """
llm.generate(7)
llm.rnug
"""
FILES = {"right.py": EXAMPLE + OTHER_PROMPTS, "wrong.py": EXAMPLE + WRONG}
CHECKERS = {
    "mypy": ["mypy", "--no-incremental"],
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


def check(checker: str, folder: Path) -> subprocess.CompletedProcess:
    """The checker's verdict on files that lie elsewhere, as a user's do."""
    for name, source in FILES.items():
        (folder / name).write_text(source)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    (folder / "mypy.ini").write_text("[mypy]\n")
    command = [sys.executable, "-m", *CHECKERS[checker], *FILES]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_takes_the_usual_example_and_finds_what_is_wrong(checker: str, tmp_path: Path) -> None:
    assert find_spec(checker) is not None
    found = check(checker, tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    places = {(file, int(n)) for file, n in re.findall(r"([\w.]+\.py):(\d+)", found.stdout)}
    last = FILES["wrong.py"].count("\n")
    assert places == {("wrong.py", last - 1), ("wrong.py", last)}, found.stdout


def test_the_package_lists_what_it_offers() -> None:
    assert set(rosellm.__all__) <= set(dir(rosellm))


@pytest.mark.slow
def test_an_editable_install_is_a_path_that_tools_can_follow(tmp_path: Path) -> None:
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "rosellm").mkdir()
    (copy / "rosellm" / "__init__.py").write_text('__version__ = "0"\n')
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        paths = [files.read(name).decode() for name in files.namelist() if name.endswith(".pth")]
    assert [Path(path.strip()).resolve() for path in paths] == [copy.resolve()]
