"""Notebook kernels forked from a process that has already imported the notebooks' libraries.

That process is Python's fork server: a kernel starts in milliseconds, in a process and namespace of its own.
CUDA does not survive a fork: on a machine with a GPU, kernels start from scratch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from subprocess import Popen
from threading import RLock, Thread
from typing import Any, cast
from uuid import uuid4

import numpy as np
import psutil
import torch
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from tqdm import tqdm

from rosellm.frozen_heap import frozen_heap
from rosellm.lab.running.interruption import SIGNALS

TRACES = [f"plotly.graph_objs._{name}" for name in ("bar", "figure", "heatmap", "scatter", "waterfall")]
LIBRARIES = ["rosellm", "safetensors.torch", "tokenizers", "torch._inductor", "torch.profiler"]
LIBRARIES += ["transformers", "ipykernel.kernelapp", "ipykernel.zmqshell", "pandas", *TRACES]
LIBRARIES += ["rosellm.lab.running.execution"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # several notebooks run at once


class KernelManager(AsyncKernelManager):
    """The manager of a kernel that this process starts by ``multiprocessing``.

    A TCP port is chosen before the kernel binds it, and might be taken by then. So on Linux the sockets are
    in the abstract namespace (unix(7)), under a random name.
    """

    def __init__(self, **options: Any) -> None:
        abstract = {"transport": "ipc", "ip": f"@rosellm-{uuid4().hex}"} if sys.platform == "linux" else {}
        super().__init__(**abstract, **options)
        self.provisioner = _Provisioner(parent=self, kernel_spec=self.kernel_spec)


class _Provisioner(LocalProvisioner):
    async def launch_kernel(self, cmd: list[str], **options: Any) -> KernelConnectionInfo:
        connection_file = cast(AsyncKernelManager, self.parent).connection_file
        context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else fork_server()
        process = context.Process(target=_serve, args=(connection_file, options.get("cwd") or os.getcwd()))
        process.start()
        self.process, self.pid = cast(Popen, _Kernel(process)), process.pid
        return self.connection_info


class _Kernel:
    """A process with the methods of ``subprocess.Popen`` that jupyter_client calls."""

    stdin = stdout = stderr = None

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.kill, self.terminate = process.kill, process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.pid and self.poll() is None:
            os.kill(self._process.pid, number)


def fork_server() -> ForkServerContext:
    """Return a context whose processes have the libraries imported; importing starts at once.

    They block SIGINT and SIGTERM until :func:`begin`, so that Ctrl-C goes to this process only.
    """
    context = multiprocessing.get_context("forkserver")
    if parent_process():  # which has started the server
        return context
    context.set_forkserver_preload(LIBRARIES)
    os.environ.update(ONE_THREAD)  # numpy and torch read it when they are imported
    resource_tracker.ensure_running()  # started later, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def begin() -> None:
    """Begin a process of a fork server's context: it starts others by its parent's server, and ends with it.

    ``multiprocessing`` says that a child reuses the server, but starts another one for want of its pid.
    """
    if sys.version_info < (3, 14):
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # noqa: SLF001
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    kill_children(psutil.Process())
    os._exit(1)


def kill_children(process: psutil.Process) -> None:
    """Kill all descendants of a process."""
    with suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _serve(connection_file: str, folder: str) -> None:
    from ipykernel.kernelapp import IPKernelApp

    begin()
    tqdm.set_lock(RLock())  # the default is a semaphore, which would outlive the kernel
    np.random.seed()
    os.chdir(folder)
    sys.path[0] = ""
    quiet = ["--log-level=ERROR", "--HistoryManager.enabled=False"]
    with frozen_heap():  # freezes all that was imported
        IPKernelApp.launch_instance(
            ["-f", connection_file, f"--IPKernelApp.parent_handle={os.getppid()}", *quiet]
        )
