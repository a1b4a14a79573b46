"""A JupyterLab on a copy of the notebooks, and a headless Chromium to look at it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
USUAL = ("00_map", "19_weights_in_flight", "24_faults")
# Beginnings of names, as `make notebooks` takes them.
WANTED = tuple(os.environ.get("NB", "").split()) or USUAL
OPENED = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path.stem.startswith(WANTED)]
if not OPENED:
    raise pytest.UsageError(f"no notebook's name begins with NB={' '.join(WANTED)!r}")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
LAB = ["-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
SETTINGS = {"apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
SETTINGS |= {"notebook-extension/tracker": {"windowingMode": "none"}}
START_S, WAIT_S = 60, 90


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """A headless browser; the system's own, since playwright's is a download of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notebooks without outputs, so that whatever is seen was made here."""
    copy = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(NOTEBOOKS, copy, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in OPENED:
        path = copy / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    return copy


@pytest.fixture(scope="session")
def lab(chromium, folder: Path) -> Iterator[tuple[str, str]]:
    """Address and token of a JupyterLab that has its settings, like its notebooks, to itself."""
    server = subprocess.Popen(
        [sys.executable, *LAB], cwd=folder, env=_environment(folder.parent), stderr=subprocess.DEVNULL
    )
    try:
        yield _address(server, folder.parent / "runtime")
    finally:
        server.terminate()
        server.wait(START_S)


def _environment(home: Path) -> dict[str, str]:
    own = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {f"JUPYTERLAB_{kind}_DIR": str(home / kind.lower()) for kind in ("SETTINGS", "WORKSPACES")}
    for name, values in SETTINGS.items():
        path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("JUPYTER")}
    return inherited | own | {"IPYTHONDIR": str(home / "ipython"), "OMP_NUM_THREADS": "1"}


def _address(server: subprocess.Popen, runtime: Path) -> tuple[str, str]:
    """Read the file in which a server tells its address and token once it listens."""
    end = monotonic() + START_S
    while not (told := list(runtime.glob("jpserver-*.json"))):
        assert server.poll() is None and monotonic() < end, "JupyterLab did not start"
        sleep(0.2)
    sleep(0.5)  # until it is whole
    info = json.loads(told[0].read_text())
    return info["url"].rstrip("/"), info["token"]


@pytest.fixture(scope="module", params=OPENED)
def page(request: pytest.FixtureRequest, chromium, lab: tuple[str, str]) -> Iterator:
    """A notebook in JupyterLab whose cells have all run, or up to the first error."""
    address, token = lab
    page = chromium.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(WAIT_S * 1000)
    page.goto(f"{address}/lab/workspaces/{request.param}/tree/{request.param}.ipynb?token={token}")
    _run_all(page)
    yield page
    page.close()


def _run_all(page) -> None:
    """JupyterLab may ignore the command, silently, until the kernel is idle for the first time."""
    idle = page.locator("#jp-main-statusbar").get_by_text("| Idle")
    idle.wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    pending = page.locator(".jp-CodeCell .jp-InputPrompt", has_text="[*]").first
    pending.wait_for()
    pending.wait_for(state="detached")
    idle.wait_for()
