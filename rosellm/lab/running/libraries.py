"""Import the third-party modules of notebooks and their pages once, for processes forked from this one."""

# isort: off
import rosellm  # noqa: F401  (decides how Triton runs)
import rosellm.lab.running.spared_imports  # noqa: F401
import gc
import warnings
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch._inductor  # noqa: F401  (the profiler looks at it)
import torch.profiler  # noqa: F401
import transformers  # noqa: F401
from ipykernel import kernelapp, zmqshell  # noqa: F401
from ipywidgets import interact  # noqa: F401
from plotly.graph_objects import Bar, Figure, Heatmap, Scatter, Waterfall  # noqa: F401
from rosellm.lab.running import run_notebooks  # noqa: F401

warnings.filterwarnings(
    "ignore", message=".*found in sys.modules after import of package"
)  # runpy, of __main__
gc.collect()
