"""What every test run shares: how Triton and notebooks run, the gpu marker, which tests run, and where."""

import rosellm  # noqa: F401, I001  (settles how Triton runs, so it comes before anything that imports Triton)
import gc
import signal
from contextlib import ExitStack
from pathlib import Path

import nbval.plugin
import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from rosellm.frozen_heap import frozen_heap
from tests import quick_interpreter
from tests.cover import combinations
from tests.warm_kernel import WarmKernel

DRAWN = ("stderr", "application/vnd.plotly.v1+json", "text/html", "image/svg+xml", "image/png")
PROCESSES = {  # files whose tests each run processes of their own
    "test_autoreload.py",
    "test_benchmarks.py",
    "test_new_notebook.py",
    "test_notebooks.py",
    "test_open_lab.py",
    "test_ranks_end.py",
    "test_run_notebooks.py",
}
LONG = PROCESSES | {
    "test_dependent_launch.py",
    "test_replicas.py",
    "test_sweep_on_ray.py",
    "test_packaging.py",
}

signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, it would be ignored
quick_interpreter.install()
settings.register_profile("shared", deadline=None)  # other processes may slow any example
settings.load_profile("shared")
nbval.plugin.RunningKernel = WarmKernel
FROZEN = ExitStack()


class Scheduling(LoadFileScheduling):
    """A file's tests stay with one worker, unless each of them runs processes anyway."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if Path(file).name in PROCESSES else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Scheduling | None:
    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Combinations are slow; what takes long comes first, so that two workers end together."""
    for item in combinations(items):
        item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not _is_long(item))


def pytest_collection_finish() -> None:
    """The garbage collector passes over all that was imported: a sixth of many files' time."""
    gc.collect()
    FROZEN.enter_context(frozen_heap())


def pytest_unconfigure() -> None:
    """Or Triton's bindings report at exit what was never collected."""
    FROZEN.close()


def _is_long(item: pytest.Item) -> bool:
    return item.path.suffix == ".ipynb" or item.path.name in LONG


def _lacks_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None and not torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _lacks_gpu(item):
        pytest.skip("needs a CUDA GPU; none here")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Leaves what is drawn, and what goes to stderr, out of nbval's comparison; text stays."""
    if type(collector).__name__ == "IPyNbFile":
        collector.skip_compare += DRAWN
