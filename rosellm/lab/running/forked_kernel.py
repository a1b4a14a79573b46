"""A notebook kernel forked from a process that has already imported the notebooks' libraries.

That process is Python's fork server with ``LIBRARIES`` preloaded: a kernel starts in milliseconds, in a
process and namespace of its own. CUDA does not survive a fork: on a machine with a GPU, kernels start from
scratch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from subprocess import Popen
from threading import RLock
from typing import Any, cast
from uuid import uuid4

import numpy as np
import torch
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from tqdm import tqdm
from traitlets import Type

from rosellm.frozen_heap import frozen_heap
from rosellm.lab.running.interruption import signals_held_back

LIBRARIES = "rosellm.lab.running.libraries"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # several notebooks run at once


def fork_server() -> ForkServerContext:
    """Return a context whose processes have the libraries imported; importing starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([LIBRARIES])
    before = os.environ.copy()
    os.environ.update(ONE_THREAD)  # numpy and torch read it when they are imported
    try:
        with signals_held_back():
            forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class ForkedKernel:
    """A child process that waits for ``serve``; must be created before this process has threads.

    The other methods are those that jupyter_client requires of a process.
    """

    stdin = stdout = stderr = None

    def __init__(self, in_child: Callable[[], object]) -> None:
        reader, self._writer = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(reader)
            return
        try:
            os.close(self._writer)
            in_child()
            with open(reader, encoding="utf-8") as told:
                file, _, folder = told.read().partition("\n")
            if file:
                _serve(file, folder)
        finally:
            os._exit(0)

    def serve(self, connection_file: str, folder: str) -> None:
        with open(self._writer, "w", encoding="utf-8") as telling:
            telling.write(f"{connection_file}\n{folder}")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProvisioner(LocalProvisioner):
    """Provides a single kernel that is already running."""

    def __init__(self, kernel: ForkedKernel, **options: Any) -> None:
        super().__init__(**options)
        self._kernel = kernel

    async def launch_kernel(self, cmd: list[str], **options: Any) -> KernelConnectionInfo:
        self._kernel.serve(
            cast(AsyncKernelManager, self.parent).connection_file, options.get("cwd") or os.getcwd()
        )
        self.process, self.pid = cast(Popen, self._kernel), self._kernel.pid
        return self.connection_info


class Client(AsyncKernelClient):
    """A client of this process's own kernel, without a heartbeat: the manager notices if the kernel ends.

    A heartbeat thread would only add error output on interruption.
    """

    def start_channels(
        self,
        shell: bool = True,
        iopub: bool = True,
        stdin: bool = True,
        hb: bool = False,
        control: bool = True,
    ) -> None:
        super().start_channels(shell, iopub, stdin, hb, control)


class OwnKernelManager(AsyncKernelManager):
    """The manager of this process's own kernel."""

    client_factory = Type(Client)


class StartedKernelManager(OwnKernelManager):
    """The manager of a kernel that starts from scratch, on Linux.

    A TCP port would be chosen seconds before the kernel binds it, and might be taken by then. So its sockets
    are in Linux's abstract namespace (unix(7)), under a random name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(transport="ipc", ip=f"@rosellm-{uuid4().hex}", **options)


def kernel_manager(in_child: Callable[[], object]) -> type[AsyncKernelManager]:
    """Return the manager of this process's only kernel; ``in_child`` runs first in a forked kernel."""
    if torch.cuda.is_available():
        return StartedKernelManager
    kernel = ForkedKernel(in_child)

    class Manager(OwnKernelManager):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.provisioner = ForkedProvisioner(kernel, parent=self, kernel_spec=self.kernel_spec)

    return Manager


def _serve(connection_file: str, folder: str) -> None:
    tqdm.set_lock(RLock())  # the default is a semaphore, which would outlive the kernel
    np.random.seed()
    os.chdir(folder)
    sys.path[0] = ""
    quiet = ["--log-level=ERROR", "--HistoryManager.enabled=False"]
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # the kernel ends with its worker
    with frozen_heap():  # freezes all that was imported
        IPKernelApp.launch_instance(["-f", connection_file, parent, *quiet])
