"""Exercises rely on %autoreload: the next engine has an edit of the package, without a restart."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rosellm

SESSION = '''
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()


def cell(source):
    result = shell.run_cell(source)
    result.raise_error()


cell("%load_ext autoreload")
cell("%autoreload 2 --full")
cell("""
import rosellm
from rosellm.lab.records.bench import Bench, get_model, make_prompts
gpt = get_model("rose-tiny", "cpu")
run = lambda: Bench(gpt, "paged", make_prompts(3, 4, gpt.config.vocab_size), 4).decode()
_ = run()
""")
step = Path(rosellm.__file__).parent / "ladder" / "dense.py"
old = step.read_text()
line = "        got, failed = self.decode(sequences)\\n"
assert old.count(line) == 1
step.write_text(old.replace(line, line + "        print(len(sequences), 'rows')\\n"))
cell("print('edited'); _ = run()")
step.write_text(old)
cell("print('undone'); _ = run()")
'''


@pytest.mark.slow
def test_an_edited_step_runs_without_a_restart_and_can_be_undone(tmp_path):
    copy = tmp_path / "rosellm"
    shutil.copytree(Path(rosellm.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(tmp_path), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import rosellm\n" + SESSION]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["edited", "3", "rows", "undone"]
