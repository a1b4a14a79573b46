"""RoseLLM: an LLM inference engine to learn from, measure and push.

Without CUDA, importing the package sets an environment variable that makes Triton interpret kernels on the
CPU. Triton reads it on import, so import ``rosellm`` before anything that imports Triton, such as the model
classes of ``transformers``.
"""

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.argv[0] == "-m" and sys.orig_argv[sys.orig_argv.index("-m") + 1].startswith("rosellm."):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports exits without a traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silence the profiler's own warnings

import torch

if torch.cuda.is_available():  # kernels compile and load in less time
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton did before it had this variable
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from rosellm.roseinfer.llm import LLM
    from rosellm.roseinfer.outputs import CompletionOutput, RequestOutput
    from rosellm.roseinfer.sampling import SamplingParams
    from rosellm.roseinfer.serving.prompts import TextPrompt, TokensPrompt

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
HOMES = {  # the modules of the names that are imported at their first use
    "LLM": "rosellm.roseinfer.llm",
    "CompletionOutput": "rosellm.roseinfer.outputs",
    "RequestOutput": "rosellm.roseinfer.outputs",
    "SamplingParams": "rosellm.roseinfer.sampling",
    "TextPrompt": "rosellm.roseinfer.serving.prompts",
    "TokensPrompt": "rosellm.roseinfer.serving.prompts",
}


def __getattr__(name: str) -> type:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'rosellm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
