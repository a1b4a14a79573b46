"""The wheel, installed into an environment that has never seen the checkout, is the whole package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from rosellm.models.checkpoint import SHIPPED_MODELS

ROOT = Path(__file__).parents[1]
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


def run(*command: str | Path, folder: Path) -> str:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel; the packages that it needs are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a build leaves files there, and takes those that an earlier one left
    shutil.copytree(ROOT / "rosellm", sources / "rosellm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, sources)
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
def test_both_models_give_the_checkouts_tokens(fresh, tmp_path):
    """A path in a .pth file brings its packages, but no editable install of this checkout."""
    code = USE.format(models=SHIPPED_MODELS)
    *tokens, where = run(fresh, "-c", code, folder=tmp_path).splitlines()
    *expected, _ = run(sys.executable, "-c", code, folder=ROOT).splitlines()
    assert tokens == expected and len(tokens) == 2
    assert Path(where).is_relative_to(fresh.parents[1])
    assert (Path(where) / "py.typed").is_file()


@pytest.mark.slow
def test_it_has_every_file_of_the_package_that_git_has(fresh):
    (installed,) = (fresh.parents[1] / "lib").glob("python*/site-packages/rosellm")
    listed = subprocess.run(["git", "ls-files", "rosellm"], cwd=ROOT, capture_output=True, text=True).stdout
    paths = listed.splitlines() or [str(p.relative_to(ROOT)) for p in ROOT.glob("rosellm/**/*.py")]
    lacking = [path for path in paths if not (installed.parent / path).is_file()]
    assert len(paths) > 150 and lacking == []


@pytest.mark.slow
def test_its_commands_run_from_anywhere(fresh, tmp_path):
    command = ("rosellm.roseinfer.benchmark_scheduler", "--device", "cpu", "--num-requests", "1")
    assert "=== online summary ===" in run(
        fresh, "-m", *command, "--max-new-tokens", "4", "--repeat-runs", "1", folder=tmp_path
    )
