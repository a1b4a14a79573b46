"""What is built and installed: every dependency declared, every file carried, types that users' tools see."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rosellm.lab.figures import _NEEDED
from rosellm.models.checkpoint import SHIPPED_MODELS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RIVALS = {"vllm"}  # measured where it happens to be installed


def run(*command: str | Path, folder: Path, status: int = 0) -> subprocess.CompletedProcess:
    """Run without this checkout on the path."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def files_of_git(folder: str = ".") -> list[str]:
    return run("git", "ls-files", folder, folder=ROOT).stdout.splitlines()


def copy_files(names: list[str], to: Path) -> Path:
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to


# Dependencies


distributions = cache(packages_distributions)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    wanted = [
        *PROJECT["dependencies"],
        *(w for extra in extras for w in PROJECT["optional-dependencies"][extra]),
    ]
    return {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}


def imported(folder: Path) -> dict[str, str]:
    """Packages from outside that files below ``folder`` import, in functions too, and one file of each."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {
        name: path
        for name, path in found.items()
        if name not in {*sys.stdlib_module_names, *RIVALS, "rosellm"}
    }


@pytest.mark.parametrize(
    ("room", "extras"),
    [("models", ()), ("roseinfer", ()), ("bench", ()), ("cluster", ("cluster",)), ("rosetrainer", ()),
     ("lab", ("notebooks",))],
)  # fmt: skip
def test_each_package_that_a_room_imports_is_declared(room: str, extras: tuple[str, ...]) -> None:
    known = declared(*extras)
    packages = imported(ROOT / "rosellm" / room)
    assert "numpy" in packages or "torch" in packages or "ray" in packages
    undeclared = {
        name: path
        for name, path in packages.items()
        if not known & {normal(distribution) for distribution in distributions().get(name, [name])}
    }
    assert not undeclared


@pytest.mark.slow
def test_the_lab_without_its_extra_says_which_extra_and_the_engine_needs_none() -> None:
    code = """
import sys
for name in ('plotly', 'papermill', 'ray'):
    sys.modules[name] = None
import rosellm.roseinfer.llm
import rosellm.lab.records.llama_1b_protocol
import rosellm.lab.rung
"""
    done = run(sys.executable, "-c", code, folder=ROOT, status=1)
    wanted = "ModuleNotFoundError: rosellm.lab needs papermill, plotly: pip install 'rosellm[notebooks]'"
    assert done.stderr.splitlines()[-1] == wanted


def test_the_lab_looks_for_every_package_of_its_extra() -> None:
    needed = {normal(found) for name in _NEEDED.split() for found in distributions().get(name, [name])}
    assert declared("notebooks") - declared() - {"jupyterlab", "traitlets"} <= needed


# Distributions

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@pytest.mark.slow
def test_the_source_distribution_carries_what_a_checkout_has(tmp_path: Path) -> None:
    files = files_of_git()
    run(sys.executable, "-c", BUILD, "build_sdist", "dist", folder=copy_files(files, tmp_path))
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        carried = {name.partition("/")[2] for name in tar.getnames()}
    assert set(files) - carried <= {".gitignore", ".ci/run"}


USE = """
from pathlib import Path
import rosellm
from rosellm import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
for model in {models}:
    llm = LLM(model, device="cpu", num_kv_blocks=8, max_batch_size=1)
    print(llm.generate([1, 2], greedy)[0].outputs[0].token_ids)
print(Path(rosellm.__file__).parent)
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel; the packages that it needs are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    files = [*files_of_git("rosellm"), "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"]
    sources = copy_files(files, folder / "sources")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder=sources)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "fresh", with_pip=False)
    python = folder / "fresh/bin/python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, folder=folder)
    (own,) = (folder / "fresh/lib").glob("python*/site-packages")
    (own / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_both_models_of_the_wheel_give_the_checkouts_tokens(fresh, tmp_path):
    """A path in a .pth file brings its packages, but no editable install of this checkout."""
    code = USE.format(models=SHIPPED_MODELS)
    *tokens, where = run(fresh, "-c", code, folder=tmp_path).stdout.splitlines()
    *expected, _ = run(sys.executable, "-c", code, folder=ROOT).stdout.splitlines()
    assert tokens == expected and len(tokens) == 2
    assert Path(where).is_relative_to(fresh.parents[1])
    assert (Path(where) / "py.typed").is_file()


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_that_git_has(fresh):
    (installed,) = (fresh.parents[1] / "lib").glob("python*/site-packages/rosellm")
    paths = files_of_git("rosellm")
    lacking = [path for path in paths if not (installed.parent / path).is_file()]
    assert len(paths) > 150 and lacking == []


@pytest.mark.slow
def test_the_wheels_commands_run_from_anywhere(fresh, tmp_path):
    sizes = "--device cpu --num-requests 1 --max-new-tokens 4 --repeat-runs 1"
    command = ("-m", "rosellm.roseinfer.benchmark_scheduler", *sizes.split())
    assert "=== online: medians of 1 runs" in run(fresh, *command, folder=tmp_path).stdout


# Types

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


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_takes_the_usual_example_and_finds_what_is_wrong(checker: str, tmp_path: Path) -> None:
    """In files that lie elsewhere, as a user's do."""
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    found = run(sys.executable, "-m", *CHECKERS[checker], *FILES, folder=tmp_path, status=1).stdout
    places = {(file, int(n)) for file, n in re.findall(r"([\w.]+\.py):(\d+)", found)}
    last = FILES["wrong.py"].count("\n")
    assert places == {("wrong.py", last - 1), ("wrong.py", last)}, found
