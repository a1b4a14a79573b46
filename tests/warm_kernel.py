"""Kernels for notebooks, forked from a process that has imported what notebooks import: 3 s saved each.

Only what others wrote is imported there; of this package a notebook imports all that it uses itself. Where
there is a GPU each kernel is a process of its own from the start, since CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from nbval.kernel import RunningKernel

PROCESSES = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")


class WarmKernel(RunningKernel):
    """What nbval asks of a kernel. ``kernel_name`` is not looked at: this interpreter's is the only one."""

    language = "python"
    said = ""  # what the last cell printed and displayed, figures as their JSON

    def __init__(self, kernel_name: str = "", cwd: str = ".", startup_timeout: float = 60.0) -> None:
        PROCESSES.set_forkserver_preload(["tests.warm_libraries"])
        self._folder = TemporaryDirectory()
        folder = self._folder.name
        file, _ = write_connection_file(f"{folder}/kernel.json", transport="ipc", ip=f"{folder}/socket")
        self._process = PROCESSES.Process(target=_serve, args=(file, cwd), daemon=True)
        self._process.start()
        self.kc = BlockingKernelClient(connection_file=file)
        self.kc.load_connection_file()
        self.kc.start_channels()
        self._wait(startup_timeout)

    def _wait(self, timeout: float) -> None:
        """Until the kernel answers and is heard to be idle; the client's own waiting sleeps 0.2 s in vain."""
        self.kc.kernel_info(reply=True, timeout=timeout)
        heard, end = False, time.monotonic() + timeout
        while not heard:
            try:
                self.await_idle(self.kc.kernel_info(), timeout=0.1)
                heard = True
            except Empty:
                if time.monotonic() > end:
                    raise

    def run(self, source: str, timeout: float = 120.0) -> str:
        """Executes a cell; its error in one line, "" if there is none."""
        self.said = ""
        reply = self.kc.execute_interactive(source, timeout=timeout, output_hook=self._hear)["content"]
        return "" if reply["status"] == "ok" else f"{reply['ename']}: {reply['evalue']}"

    def _hear(self, message: dict[str, Any]) -> None:
        content = message["content"]
        self.said += content.get("text", "") or str(content.get("data", ""))

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def interrupt(self) -> None:
        os.kill(self._process.pid, signal.SIGINT)

    def stop(self) -> None:
        self.kc.stop_channels()
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def _serve(connection_file: str, folder: str) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "rosellm"]:
        del sys.modules[module]  # the warm libraries' way to spare an import is of this package
    multiprocessing.current_process()._config["daemon"] = False  # or it might not start ranks
    gc.freeze()  # the garbage collector passes over all that was imported
    os.chdir(folder)
    sys.path[0] = ""
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # the kernel ends with the tests
    IPKernelApp.launch_instance(["-f", connection_file, parent, "--HistoryManager.enabled=False"])
