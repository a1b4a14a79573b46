"""What every test run shares: Triton's interpreter without CUDA, the gpu marker, nbval's comparison."""

import rosellm  # noqa: F401, I001  (settles how Triton runs, so it comes before anything that imports Triton)
import nbval.plugin
import pytest
import torch

from tests import quick_interpreter
from tests.warm_kernel import WarmKernel

quick_interpreter.install()
nbval.plugin.RunningKernel = WarmKernel

DRAWN = ("stderr", "application/vnd.plotly.v1+json", "text/html", "image/svg+xml", "image/png")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; none here")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Leaves what is drawn, and what goes to stderr, out of nbval's comparison; text stays."""
    if type(collector).__name__ == "IPyNbFile":
        collector.skip_compare += DRAWN
