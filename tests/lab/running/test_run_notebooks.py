"""The batch runner, on notebooks made here that import nothing heavy."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from rosellm.lab.running import run_notebooks
from rosellm.lab.running.execution import NotebookError
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.run_notebooks import parameters_of, parse_parameters, run, select
from tests.roseinfer.ranks import is_running

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "rosellm.lab.running.run_notebooks"]
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
TRANSPORT = "ipc" if sys.platform == "linux" else "tcp"  # whose port another process may take
FILES = {"gallery.json", "index.html", "pages.js", "plotly.min.js"}
WAITS = "import os, time\nos.open({note!r}, os.O_CREAT)\nwhile True:\n    time.sleep(0.1)"


def save(folder: Path, name: str, *sources: str, parameters: str = "batch = 4\nquick = True") -> Path:
    cells = [new_markdown_cell(f"# What does `{name}` do?"), new_code_cell(parameters)]
    cells[1].metadata["tags"] = ["parameters"]
    cells += [new_code_cell(source) for source in sources]
    path = folder / f"{name}.ipynb"
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), path)
    return path


def status_of(command, arguments: list[str]) -> int:
    """The exit status of a command's ``main``."""
    try:
        return command(arguments)
    except SystemExit as end:
        return end.code


def main(arguments: list[str]) -> int:
    return status_of(run_notebooks.main, arguments)


def printed(path: Path) -> str:
    outputs = [o for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def wait_until(condition, seconds: float = 100.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def family_of(pid: int) -> list[int]:
    """All descendants of a process."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def none_runs(pids: list[int]) -> bool:
    return wait_until(lambda: not any(map(is_running, pids)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "notebooks"


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return tmp_path / "build"


@pytest.fixture
def command(folder: Path, build: Path) -> list[str]:
    return ["--notebooks", str(folder), "--output", str(build)]


class TestSelect:
    NAMES = ("00_map", "02_paged", "02_paged_more", "03_pinned_h2d", "13_resident_step")

    @pytest.fixture(autouse=True)
    def notebooks(self, folder: Path) -> None:
        for name in self.NAMES:
            save(folder, name)

    @pytest.mark.parametrize(
        ("wanted", "numbers"),
        [
            ("", [0, 1, 2, 3, 4]),
            ("02,00", [0, 1, 2]),  # a beginning chooses all that begin so, once and in order
            ("notebooks/03_pinned_h2d.ipynb  00", [0, 3]),
            ("02_paged", [1]),  # a whole name goes before a beginning
            ("0 02", [0, 1, 2, 3]),
            ("3_", [3, 4]),  # and a beginning before a part
            ("h2d", [3]),
        ],
    )
    def test_a_notebook_is_named_by_number_path_or_a_part_of_its_name(self, folder, wanted, numbers):
        assert [path.stem for path in select(folder, wanted)] == [self.NAMES[n] for n in numbers]


class TestParameters:
    def test_values_are_typed_and_lists_keep_their_quotes(self):
        numbers = {"batch": 64, "quick": False, "rate": 1.5, "sizes": [1, 2, 4], "nothing": None}
        assert parse_parameters("batch=64 quick=false rate=1.5 sizes=[1, 2,4] nothing=null") == numbers
        texts = {"name": "rose-tiny", "text": "two words", "rungs": ["dense", "paged"], "modes": ["all"]}
        written = 'name=rose-tiny text=\'two words\' rungs=["dense", "paged"] modes=[all]'
        assert parse_parameters(written) == texts

    @pytest.mark.parametrize(
        ("default", "value", "fits"),
        [("0.5", 2, True), ("0.5", True, False), ("4", 2.5, False), ("[1]", [True], False)],
    )
    def test_a_value_has_its_defaults_type_and_a_bool_is_no_number(self, folder, default, value, fits):
        notebook = save(folder, "a", parameters=f"rate = {default}")
        with nullcontext() if fits else pytest.raises(NotebookError, match="rate"):
            parameters_of([notebook], {"rate": value})

    def test_a_notebook_gets_the_parameters_that_it_has_and_one_that_none_has_is_refused(self, folder):
        both = [save(folder, "a"), save(folder, "b", parameters="batch = 4")]
        assert parameters_of(both, {"batch": 2, "quick": False}) == {
            "a": {"batch": 2, "quick": False},
            "b": {"batch": 2},
        }
        with pytest.raises(NotebookError, match="'bacth': it has batch, quick, and 1 others lack it, too"):
            parameters_of(both, {"bacth": 2})


class TestRun:
    def test_a_run_leaves_notebooks_pages_and_index_and_names_the_failure(
        self, folder, build, command, capsys
    ):
        good = save(folder, "00_good", "print('batch', batch * 2, quick)")
        bad = save(folder, "01_bad", "1 / 0", "print('never')")
        before = good.read_bytes(), bad.read_bytes()
        assert main([*command, "--parameters", "batch=21 quick=false"]) == 1
        out, err = capsys.readouterr()
        assert re.search(r"00_good +\d+\.\d +ok\n01_bad +\d+\.\d +failed", out)
        assert "FAILED 01_bad: cell 3: ZeroDivisionError: division by zero" in err
        assert printed(build / "00_good.ipynb") == "batch 42 False\n"
        assert (good.read_bytes(), bad.read_bytes()) == before
        index = (build / "index.html").read_text()
        assert "What does 00_good do?" in index and "division by zero" in index and "batch=21" in index
        assert "http" not in index
        assert all((build / link).is_file() for link in re.findall(r'href="([^"]+)"', index))
        assert "batch 42 False" in (build / "00_good.html").read_text()
        assert not list(build.glob(".*"))

    @pytest.mark.slow
    def test_a_kernel_that_dies_fails_its_notebook_only(self, folder, build):
        notebooks = [save(folder, "a", "import os; os._exit(1)"), save(folder, "b", "print('b')")]
        dead, fine = run(notebooks, build)
        assert (dead.status, fine.status) == ("failed", "ok")
        assert "DeadKernelError" in dead.error

    def test_a_notebook_beyond_its_time_is_ended_with_its_kernel_and_what_that_has_started(
        self, folder, tmp_path, build
    ):
        note = tmp_path / "pids"
        source = "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '1000'])\n"
        source += f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(1000)"
        notebook = save(folder, "a", source)
        for seconds in (0.5, 3, 12, 48):  # before a kernel has started, and after
            (outcome,) = run([notebook], build, timeout=seconds)
            assert (outcome.status, outcome.seconds) == ("timeout", seconds)
            assert outcome.error == f"not done after {seconds} s"
            if note.exists():
                break
        assert none_runs([int(pid) for pid in note.read_text().split()])

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ("--select 00 07", "no notebook is called '07': there are 00_map"),
            ("--select .ipynb", "no notebook is called ''"),
            ("--select  , ", "' , ' names no notebook: there are 00_map"),
            ("--notebooks /", "there is no notebook in /"),
            ("--parameters batch", "the parameters .* cannot be read: .* name=value, not as 'batch'"),
            ("--parameters =4", "the parameters .* cannot be read: .* name=value"),
            ("--parameters 1x=2", "the parameters .* cannot be read: .* name=value"),
            ("--parameters batch=[1", "the parameters 'batch=\\[1' cannot be read"),
            ("--parameters name='open", "the parameters .* cannot be read: ValueError"),
            ("--parameters bacth=1", "00_map has no parameter 'bacth': it has batch, quick"),
            ("--workers 0", "argument --workers"),
            ("--timeout 0", "timeout must be above 0"),
            (f"--output {__file__}", "output .* cannot be a folder"),
        ],
    )
    def test_a_bad_option_is_one_line_and_exit_code_2(self, folder, build, command, capsys, wrong, told):
        save(folder, "00_map")
        assert main([*command, *wrong.split(" ", 1)]) == 2
        err = capsys.readouterr().err
        assert re.match(f"error: {told}", err) and err.count("\n") == 1
        assert not build.exists()


@pytest.mark.slow
def test_the_kernel_is_this_interpreter_in_the_notebooks_folder_with_one_thread_and_leaves_nothing(
    folder, tmp_path, build, command
):
    """The command as a process, in an environment that tries to mislead it."""
    for kernels in (tmp_path / "path", tmp_path / "home/.local/share/jupyter"):
        (kernels / "kernels/python3").mkdir(parents=True)
        description = {"argv": ["/bin/false"], "display_name": "wrong", "language": "python"}
        (kernels / "kernels/python3/kernel.json").write_text(json.dumps(description))
    source = "import os, sys\nfrom ipykernel.connect import get_connection_info as told\n"
    source += (
        "print(sys.executable, os.getcwd(), os.environ['OMP_NUM_THREADS'], told(unpack=True)['transport'])"
    )
    save(folder, "a", source, "from tqdm import tqdm\nfor _ in tqdm(range(3)):\n    pass")
    paths = {"JUPYTER_PATH": str(tmp_path / "path"), "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([*COMMAND, *command], env=os.environ | paths | {"OMP_NUM_THREADS": "7"}, **options)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
    assert printed(build / "a.ipynb").startswith(f"{sys.executable} {folder} 1 {TRANSPORT}\n")
    left = {path.name for path in tmp_path.iterdir()} - {"torchinductor_root"}
    assert left == {"path", "home", "notebooks", "build"}


@pytest.mark.slow
class TestInterrupted:
    """Stopped by signals as a terminal, a service manager or an impatient user sends them."""

    def make(self, folder: Path, *variables: str) -> subprocess.Popen:
        """``make notebooks`` in a session of its own, as in a terminal."""
        for name, age in (("pyproject.toml", 100), ("installed", 0)):
            (folder / name).touch()
            os.utime(folder / name, (time.time() - age,) * 2)
        command = ["make", "-f", str(ROOT / "Makefile"), f"PY={sys.executable}", "STAMP=installed"]
        options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "start_new_session": True}
        return subprocess.Popen(
            [*command, "notebooks", *variables], stderr=subprocess.PIPE, text=True, **options
        )

    def is_whole(self, build: Path) -> bool:
        """No file that is hidden or half there; every notebook has its page and its card."""
        if not build.exists() or not list(build.iterdir()):
            return True
        names = {path.stem for path in build.glob("*.ipynb")}
        for name in names:
            nbformat.validate(nbformat.read(build / f"{name}.ipynb", as_version=4))
            assert (build / f"{name}.html").read_text().rstrip().endswith("</html>")
        assert set(json.loads((build / "gallery.json").read_text())) == names
        expected = FILES | {f"{name}.{kind}" for name in names for kind in ("ipynb", "html")}
        return {path.name for path in build.iterdir()} == expected

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_at_make_publishes_what_is_finished_and_the_next_run_works(
        self, folder, tmp_path, build, number
    ):
        """A terminal sends Ctrl-C to all its processes, a service manager SIGTERM to make alone."""
        note = tmp_path / "note"
        save(folder, "00_done", "print('done')")
        endless = save(folder, "01_endless", WAITS.format(note=str(note)))
        save(folder, "02_never", "print('never')")
        process = self.make(tmp_path, "WORKERS=1")
        assert wait_until(note.exists)
        family = family_of(process.pid)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # users press it twice
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=100)
        assert process.returncode != 0 and "Traceback" not in err
        told = f"interrupted by {number.name}: finished 00_done; not finished 01_endless, 02_never"
        assert err.count("interrupted by") == 1 and told in err.splitlines(), err
        assert none_runs(family)
        assert self.is_whole(build) and printed(build / "00_done.ipynb") == "done\n"
        assert not (build / "01_endless.ipynb").exists() and not (build / "02_never.ipynb").exists()
        save(folder, endless.stem, "print('now')")
        run(select(folder), build)
        assert self.is_whole(build) and printed(build / "01_endless.ipynb") == "now\n"

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("seed", range(3))
    def test_a_signal_at_any_moment_is_the_exit_code_and_leaves_nothing_half_done(
        self, folder, build, command, capsys, number, seed
    ):
        before = psutil.Process().children()
        for name in ("a", "b", "c"):
            save(folder, name, "print(1)")
        seconds = random.Random(f"{seed} {number}").uniform(0.0, 4.0)
        clock = threading.Timer(seconds, os.kill, (os.getpid(), number))
        with Interruption():
            clock.start()
            status = main([*command, "--workers", "1"])
            clock.cancel()
            clock.join()
        assert status in (0, 128 + number)
        finished = {path.stem for path in build.glob("*.ipynb")}
        assert (finished == {"a", "b", "c"}) == (status == 0)
        told = capsys.readouterr().err.splitlines()[-1]
        if status:
            rest = ", ".join(sorted({"a", "b", "c"} - finished))
            assert told.endswith(f"finished {', '.join(sorted(finished)) or 'none'}; not finished {rest}")
        assert wait_until(lambda: psutil.Process().children() == before) and self.is_whole(build)

    def test_when_the_command_is_killed_its_kernels_end(self, folder, tmp_path, build, command):
        note = tmp_path / "note"
        source = f"import os, time\nopen({str(tmp_path / 'half')!r}, 'w').write(str(os.getpid()))\n"
        source += f"os.rename({str(tmp_path / 'half')!r}, {str(note)!r})\ntime.sleep(100)"
        save(folder, "a", source)
        process = subprocess.Popen([*COMMAND, *command], cwd=ROOT)
        assert wait_until(note.exists)
        family = family_of(process.pid)
        assert int(note.read_text()) in family
        process.kill()
        process.wait()
        assert none_runs(family)
        assert list(build.iterdir()) == []
