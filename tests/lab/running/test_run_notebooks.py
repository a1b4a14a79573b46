"""The batch runner, on notebooks made here that import nothing heavy."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rosellm.lab.running import notebook_workers
from rosellm.lab.running.forked_kernel import StartedKernelManager
from rosellm.lab.running.interruption import Interruption, is_running
from rosellm.lab.running.notebook_workers import Job, NotebookError, kernel_environment
from rosellm.lab.running.run_notebooks import check_parameters, main, parse_parameters, run, select

ROOT = Path(__file__).parents[3]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def save(folder: Path, name: str, *sources: str, parameters: str = "batch = 4\nquick = True") -> Path:
    cells = [new_markdown_cell(f"# What does `{name}` do?"), new_code_cell(parameters)]
    cells[1].metadata["tags"] = ["parameters"]
    cells += [new_code_cell(source) for source in sources]
    path = folder / f"{name}.ipynb"
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), path)
    return path


def printed(path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    return "".join(o.text for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "stream")


def wait_until(condition, seconds: float = 100.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "notebooks"


class TestSelect:
    @pytest.fixture(autouse=True)
    def notebooks(self, folder: Path) -> None:
        for name in ("00_map", "01_dense", "02_paged", "02_paged_more"):
            save(folder, name)

    @pytest.mark.parametrize(
        ("wanted", "names"),
        [
            ("", ["00_map", "01_dense", "02_paged", "02_paged_more"]),
            ("01", ["01_dense"]),
            ("02,00", ["00_map", "02_paged", "02_paged_more"]),
            ("01_dense.ipynb  00", ["00_map", "01_dense"]),
            ("02_paged", ["02_paged"]),
            ("0 01", ["00_map", "01_dense", "02_paged", "02_paged_more"]),
        ],
    )
    def test_names_and_prefixes_choose_in_order_and_once(self, folder, wanted, names):
        assert [path.stem for path in select(folder, wanted)] == names

    def test_an_unknown_name_is_an_error_that_lists_the_notebooks(self, folder):
        with pytest.raises(NotebookError, match="'07'.*00_map, 01_dense, 02_paged, 02_paged_more"):
            select(folder, "00 07")

    def test_a_folder_without_notebooks_is_an_error(self, tmp_path):
        with pytest.raises(NotebookError, match="no notebook in"):
            select(tmp_path)


class TestParameters:
    def test_values_are_typed(self):
        text = "batch=64 quick=false rate=1e-3 name=rose-tiny sizes=[1, 2,4] nothing=null text='two words'"
        assert parse_parameters(text) == {
            "batch": 64,
            "quick": False,
            "rate": 1e-3,
            "name": "rose-tiny",
            "sizes": [1, 2, 4],
            "nothing": None,
            "text": "two words",
        }

    def test_lists_of_strings_keep_their_quotes(self):
        assert parse_parameters('rungs=["dense", "paged"] modes=[online, all]') == {
            "rungs": ["dense", "paged"],
            "modes": ["online", "all"],
        }

    @pytest.mark.parametrize("text", ["batch", "=4", "1x=2", "batch=[1", "name='open"])
    def test_what_is_not_a_pair_is_an_error(self, text):
        with pytest.raises(NotebookError):
            parse_parameters(text)

    def test_an_unknown_name_is_an_error_that_lists_the_known(self, folder):
        notebook = save(folder, "a")
        with pytest.raises(NotebookError, match="a has no parameter 'bacth': it has batch, quick"):
            check_parameters([notebook], {"bacth": 3})

    @pytest.mark.parametrize(
        ("default", "value", "fits"),
        [
            ("0.5", 2, True),
            ("0.5", True, False),
            ("4", True, False),
            ("4", 2.5, False),
            ("[1]", [True], False),
        ],
    )
    def test_a_value_has_its_defaults_type_and_a_bool_is_no_number(self, folder, default, value, fits):
        notebook = save(folder, "a", parameters=f"rate = {default}")
        with nullcontext() if fits else pytest.raises(NotebookError, match="rate"):
            check_parameters([notebook], {"rate": value})

    def test_every_selected_notebook_must_know_a_parameter(self, folder):
        both = [save(folder, "a"), save(folder, "b", parameters="quick = True")]
        check_parameters(both, {"quick": False})
        with pytest.raises(NotebookError, match="b has no parameter 'batch'"):
            check_parameters(both, {"batch": 3})


class TestRun:
    def test_a_run_leaves_notebooks_pages_and_index_and_names_the_failure(self, folder, tmp_path, capsys):
        good = save(folder, "00_good", "print('batch', batch * 2, quick)")
        bad = save(folder, "01_bad", "1 / 0", "print('never')")
        before = good.read_bytes(), bad.read_bytes()
        build = tmp_path / "build"
        command = ["--notebooks", str(folder), "--output", str(build), "--parameters", "batch=21 quick=false"]
        assert main(command) == 1
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
    def test_a_kernel_that_dies_fails_its_notebook_only(self, folder, tmp_path):
        notebooks = [save(folder, "a", "import os; os._exit(1)"), save(folder, "b", "print('b')")]
        dead, fine = run(notebooks, tmp_path / "build")
        assert (dead.status, fine.status) == ("failed", "ok")
        assert "DeadKernelError" in dead.error

    def test_a_notebook_beyond_its_time_is_ended_with_its_kernel(self, folder, tmp_path):
        note = tmp_path / "pid"
        source = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
        notebook = save(folder, "a", source)
        for seconds in (3, 6, 12, 24, 48):  # until a kernel has started in its time
            (outcome,) = run([notebook], tmp_path / "build", timeout=seconds)
            assert (outcome.status, outcome.seconds) == ("timeout", seconds)
            if note.exists():
                break
        assert wait_until(lambda: not is_running(int(note.read_text())))

    @pytest.mark.slow
    def test_two_notebooks_run_at_the_same_time(self, folder, tmp_path):
        meet = "import pathlib, time\npathlib.Path('{0}').touch()\nwhile not pathlib.Path('{1}').exists():\n"
        meet += "    time.sleep(0.05)"
        notebooks = [save(folder, "a", meet.format("x", "y")), save(folder, "b", meet.format("y", "x"))]
        assert [outcome.status for outcome in run(notebooks, tmp_path / "build", timeout=60)] == ["ok", "ok"]

    @pytest.mark.slow
    @pytest.mark.skipif(torch.cuda.is_available(), reason="kernels start from nothing where CUDA is")
    def test_a_kernel_has_the_libraries_at_once_but_names_and_random_numbers_of_its_own(
        self, folder, tmp_path
    ):
        source = "import builtins, sys\nprint('torch' in sys.modules, hasattr(builtins, 'left'), __name__)\n"
        source += "builtins.left = 1\nprint(sys.modules['numpy'].random.rand(9))"
        notebooks = [save(folder, name, source) for name in ("a", "b")]
        run(notebooks, tmp_path / "build", workers=1)
        one, other = (printed(tmp_path / "build" / path.name).splitlines() for path in notebooks)
        assert one[0] == other[0] == "True False __main__"
        assert one[1] != other[1]

    @pytest.mark.skipif(sys.platform != "linux", reason="a GPU's machine is Linux")
    def test_a_kernel_that_starts_from_scratch_has_no_port_that_another_process_may_take(
        self, folder, tmp_path, monkeypatch
    ):
        source = "import os\nfrom ipykernel.connect import get_connection_info\n"
        source += "print(os.getpid(), get_connection_info(unpack=True)['transport'])"
        for name, value in kernel_environment(tmp_path / "kernels").items():
            monkeypatch.setenv(name, value)
        job = Job(save(folder, "a", source), {}, tmp_path / "scratch")
        job.scratch.mkdir()
        assert notebook_workers._execute(job, StartedKernelManager)[1] == ""
        pid, transport = printed(job.scratch / "a.ipynb").split()
        assert transport == "ipc"
        assert wait_until(lambda: not is_running(int(pid)))

    @pytest.mark.slow
    def test_a_selection_renews_its_card_and_keeps_the_others(self, folder, tmp_path):
        notebooks, build = [save(folder, "a", "print(1)"), save(folder, "b", "print(1)")], tmp_path / "build"
        run(notebooks, build)
        save(folder, "a", "1 / 0")
        run(notebooks[:1], build)
        cards = json.loads((build / "gallery.json").read_text())
        assert {name: card["status"] for name, card in cards.items()} == {"a": "failed", "b": "ok"}
        notebooks[1].unlink()
        run(notebooks[:1], build)
        assert list(json.loads((build / "gallery.json").read_text())) == ["a"]

    @pytest.mark.slow
    def test_the_committed_picture_serves_when_the_run_makes_none(self, folder, tmp_path):
        path = save(folder, "a", "print(1)")
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[2].outputs = [new_output("display_data", {"image/png": PNG})]
        nbformat.write(notebook, path)
        run([path], tmp_path / "build")
        assert f'<img src="data:image/png;base64,{PNG}"' in (tmp_path / "build/index.html").read_text()

    def test_an_unknown_notebook_or_parameter_is_one_line_and_exit_code_2(self, folder, tmp_path, capsys):
        save(folder, "00_map")
        base = ["--notebooks", str(folder), "--output", str(tmp_path / "build")]
        for wrong in (
            ["--select", "9"],
            ["--select", ","],
            ["--parameters", "bacth=1"],
            ["--workers", "0"],
            ["--timeout", "0"],
        ):
            assert main(base + wrong) == 2
            err = capsys.readouterr().err
            assert err.startswith("error: ") and err.count("\n") == 1
        assert not (tmp_path / "build").exists()

    def test_an_output_folder_that_takes_no_files_is_one_line_and_exit_code_2(
        self, folder, tmp_path, capsys, monkeypatch
    ):
        def refuse(*_, **__):
            raise OSError(30, "Read-only file system", str(tmp_path / "build"))

        save(folder, "00_map")
        monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
        assert main(["--notebooks", str(folder), "--output", str(tmp_path / "build")]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and "Read-only file system" in err and err.count("\n") == 1


class TestCommand:
    """The command as a process, in an environment that tries to mislead it."""

    @pytest.fixture
    def start(self, folder: Path, tmp_path: Path):
        for kernels in (tmp_path / "path", tmp_path / "home/.local/share/jupyter"):
            (kernels / "kernels/python3").mkdir(parents=True)
            description = {"argv": ["/bin/false"], "display_name": "wrong", "language": "python"}
            (kernels / "kernels/python3/kernel.json").write_text(json.dumps(description))
        paths = {"JUPYTER_PATH": str(tmp_path / "path"), "HOME": str(tmp_path / "home")}
        environment = os.environ | paths | {"OMP_NUM_THREADS": "7"}
        command = [sys.executable, "-m", "rosellm.lab.running.run_notebooks", "--notebooks", str(folder)]
        command += ["--output", str(tmp_path / "build")]
        return lambda: subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    @pytest.mark.slow
    def test_the_kernel_is_this_interpreter_in_the_notebooks_folder_with_one_thread(
        self, folder, tmp_path, start
    ):
        source = "import os, sys; print(sys.executable, os.getcwd(), os.environ['OMP_NUM_THREADS'])"
        save(folder, "a", source)
        process = start()
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert printed(tmp_path / "build/a.ipynb") == f"{sys.executable} {folder} 1\n"

    @pytest.mark.slow
    def test_a_progress_bar_in_a_notebook_leaves_nothing_behind(self, folder, start):
        save(folder, "a", "from tqdm import tqdm\nfor _ in tqdm(range(3)):\n    pass")
        process = start()
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0 and "leaked" not in err, err


WAITS = "import os, time\nos.open({note!r}, os.O_CREAT)\nwhile True:\n    time.sleep(0.1)"


@pytest.mark.slow
class TestInterrupted:
    """Stopped by signals as a terminal, a service manager or an impatient user sends them."""

    @pytest.fixture
    def build(self, tmp_path: Path) -> Path:
        return tmp_path / "build"

    @pytest.fixture
    def make(self, folder: Path, tmp_path: Path):
        """``make notebooks`` in a session of its own, as in a terminal; what is left of it goes at last."""
        if shutil.which("make") is None:
            pytest.skip("make is not installed")
        for name, age in (("pyproject.toml", 100), ("installed", 0)):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        command = [
            "make",
            "-f",
            str(ROOT / "Makefile"),
            f"PY={sys.executable}",
            "STAMP=installed",
            "notebooks",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RUN_ID": str(tmp_path)}
        started = []

        def start(*options: str) -> subprocess.Popen:
            started.append(
                subprocess.Popen(
                    [*command, *options],
                    cwd=tmp_path,
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            return started[-1]

        yield start
        for process in started:
            process.kill()
            process.wait()
        for orphan in self.running(tmp_path):
            orphan.kill()

    def running(self, tmp_path: Path) -> list[psutil.Process]:
        """Whatever descends from a run in this folder: the environment is handed down."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("RUN_ID") == str(tmp_path):
                    found.append(process)
        return found

    def nothing_runs(self, tmp_path: Path) -> bool:
        return wait_until(lambda: not self.running(tmp_path))

    def no_kernel_runs(self) -> bool:
        """Below the fork server, whose children are workers and theirs kernels, nothing goes on."""
        return wait_until(
            lambda: (
                not any(
                    is_running(process.pid)
                    for server in psutil.Process().children()
                    for process in server.children(recursive=True)
                )
            )
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
        expected = {"gallery.json", "index.html", "plotly.min.js"}
        expected |= {f"{name}.{kind}" for name in names for kind in ("ipynb", "html")}
        return {path.name for path in build.iterdir()} == expected

    def test_ctrl_c_at_make_publishes_what_is_finished_and_the_next_run_works(
        self, folder, tmp_path, build, make
    ):
        note = tmp_path / "note"
        save(folder, "00_done", "print('done')")
        endless = save(folder, "01_endless", WAITS.format(note=str(note)))
        save(folder, "02_never", "print('never')")
        process = make("WORKERS=1")
        assert wait_until(note.exists)
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)  # users press it twice
        _, err = process.communicate(timeout=100)
        assert process.returncode != 0 and "Traceback" not in err
        told = "interrupted by SIGINT: finished 00_done; not finished 01_endless, 02_never"
        assert err.count("interrupted by") == 1 and told in err.splitlines(), err
        assert self.nothing_runs(tmp_path)
        assert self.is_whole(build) and printed(build / "00_done.ipynb") == "done\n"
        assert not (build / "01_endless.ipynb").exists() and not (build / "02_never.ipynb").exists()
        save(folder, endless.stem, "print('now')")
        run(select(folder), build)
        assert self.is_whole(build) and printed(build / "01_endless.ipynb") == "now\n"

    def test_sigterm_to_make_alone_ends_the_run(self, folder, tmp_path, build, make):
        note = tmp_path / "note"
        save(folder, "a", WAITS.format(note=str(note)))
        process = make()
        assert wait_until(note.exists)
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=100)
        assert "interrupted by SIGTERM: finished none; not finished a" in err.splitlines(), err
        assert process.returncode != 0 and "Traceback" not in err
        assert self.nothing_runs(tmp_path) and list(build.iterdir()) == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_to_the_command_alone_is_its_exit_code(self, folder, build, capsys, number):
        save(folder, "a", f"import os, time\nos.kill({os.getpid()}, {number})\ntime.sleep(100)")
        with Interruption() as outer:  # a signal that came too late would end the tests
            status = main(["--notebooks", str(folder), "--output", str(build)])
        assert (status, outer.number) == (128 + number, None)
        told = f"interrupted by {number.name}: finished none; not finished a"
        assert capsys.readouterr().err.splitlines()[-1] == told
        assert self.no_kernel_runs() and list(build.iterdir()) == []

    @pytest.mark.parametrize("seed", range(4))
    def test_a_signal_at_any_moment_leaves_nothing_half_done(self, folder, build, capsys, seed):
        for name in ("a", "b", "c"):
            save(folder, name, "print(1)")
        rng = random.Random(seed)
        number, seconds = rng.choice([signal.SIGINT, signal.SIGTERM]), rng.uniform(0.0, 3.0)
        clock = threading.Timer(seconds, os.kill, (os.getpid(), number))
        with Interruption():
            clock.start()
            status = main(["--notebooks", str(folder), "--output", str(build), "--workers", "1"])
            clock.cancel()
            clock.join()
        assert status in (0, 128 + number)
        finished = {path.stem for path in build.glob("*.ipynb")}
        assert (finished == {"a", "b", "c"}) == (status == 0)
        told = capsys.readouterr().err.splitlines()[-1]
        if status:
            rest = ", ".join(sorted({"a", "b", "c"} - finished))
            assert told.endswith(f"finished {', '.join(sorted(finished)) or 'none'}; not finished {rest}")
        assert self.no_kernel_runs() and self.is_whole(build)

    def test_when_the_supervisor_is_killed_its_workers_end_and_the_next_run_clears_up(
        self, folder, tmp_path, build
    ):
        note = tmp_path / "note"
        source = "import os, pathlib, time\npids = f'{os.getpid()} {os.getppid()}'\n"
        source += f"pathlib.Path({str(tmp_path / 'half')!r}).write_text(pids)\n"
        source += f"os.rename({str(tmp_path / 'half')!r}, {str(note)!r})\ntime.sleep(100)"
        supervisor = multiprocessing.get_context("forkserver").Process(
            target=run, args=([save(folder, "a", source)], build)
        )
        supervisor.start()
        assert wait_until(note.exists)
        supervisor.kill()
        supervisor.join()
        kernel, worker = map(int, note.read_text().split())
        assert wait_until(lambda: not is_running(kernel) and not is_running(worker))
        (left,) = build.iterdir()
        concurrent = build / f".run-{os.getpid()}-x"
        concurrent.mkdir()
        run([save(folder, "a", "print(1)")], build)
        assert not left.exists() and concurrent.exists()
        concurrent.rmdir()
        assert self.is_whole(build)


def test_what_the_callers_jupyter_path_leads_to_comes_after_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "theirs"))
    path = kernel_environment(tmp_path / "ours")["JUPYTER_PATH"]
    assert path.split(os.pathsep) == [str(tmp_path / "ours"), str(tmp_path / "theirs")]
    monkeypatch.delenv("JUPYTER_PATH")
    assert kernel_environment(tmp_path / "own")["JUPYTER_PATH"] == str(tmp_path / "own")


def test_a_page_that_cannot_be_made_is_told_in_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no template\nin any path")

    monkeypatch.setattr(notebook_workers, "page", fail)
    executed = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), executed)
    told = notebook_workers._write_page(executed, tmp_path)
    assert told == "executed, but its page was not made: ValueError: no template"
    assert not executed.with_suffix(".html").exists()
