"""Describe the environment of a measurement, for its record: hardware, versions and commit."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import rosellm

COMMIT_VARIABLE = "ROSELLM_COMMIT"
CHECKOUT = Path(rosellm.__file__).resolve().parent.parent


def environment(device: torch.device) -> dict[str, Any]:
    """Return the hardware, software versions, git commit and UTC time of a measurement on ``device``.

    The commit is None outside a checkout, unless the variable ROSELLM_COMMIT names one. ``host`` and
    ``lease`` are fingerprints: of the processor and the GPU, and of the GPU and this boot of the machine.
    They are equal if and only if these are, and name no machine.
    """
    is_gpu = device.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(device) if is_gpu else _cpu_name(),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_gpu else None,
        "driver": first_line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if is_gpu
        else None,
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        **_fingerprints(str(torch.cuda.get_device_properties(device).uuid) if is_gpu else platform.node()),
        "torch_threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "transformers", "numpy")},
        "rosellm": rosellm.__version__,
        **_git_state(),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _fingerprints(unit: str) -> dict[str, str]:
    """Return the fingerprints of host and lease. unit: identifies a GPU, or a machine without one."""
    told = {"host": f"{_cpu_name()} {unit}", "lease": f"{_boot()} {unit}"}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in told.items()}


def _boot() -> str:
    """Identify the time since the machine was started."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii") if path.is_file() else f"{psutil.boot_time() / 60:.0f}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, str | bool | None]:
    """Return the commit of the package's checkout, and whether tracked files differ from that commit.

    If the package was copied without its history, the variable ROSELLM_COMMIT can name the commit.
    """
    git = ("git", "-C", str(CHECKOUT))
    commit = first_line_of(*git, "rev-parse", "--verify", "HEAD") if (CHECKOUT / ".git").exists() else None
    if commit is None:
        return {"git_commit": os.environ.get(COMMIT_VARIABLE), "git_dirty": None}
    changes = first_line_of(*git, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def first_line_of(*command: str) -> str | None:
    """Return the first line of a command's output; None if it is missing, fails or takes over 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None
