"""What notebooks import that others wrote, imported once: their kernels are forked from this process."""

# isort: off
import rosellm  # noqa: F401  (settles how Triton runs, so it comes before anything that imports Triton)
import rosellm.lab.running.spared_imports  # noqa: F401  (spares the import of a grammar)
import gc
import sys
import cProfile  # noqa: F401
import nbconvert  # noqa: F401  (this and the next for the batch runner, whose workers fork from here, too)
import papermill  # noqa: F401
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch._inductor  # noqa: F401  (the profiler looks at it)
import torch.profiler  # noqa: F401
import torch.utils._device  # noqa: F401
import transformers  # noqa: F401
from ipykernel import kernelapp, zmqshell  # noqa: F401
from plotly.graph_objects import Bar, Figure, Heatmap, Scatter, Waterfall  # noqa: F401

from tests import quick_interpreter

quick_interpreter.install()
for module in [name for name in sys.modules if name.partition(".")[0] == "rosellm"]:
    del sys.modules[module]
gc.collect()
