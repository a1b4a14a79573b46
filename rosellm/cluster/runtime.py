"""Ray in this process: an existing runtime, a cluster joined by its address, or a new local one."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from threading import RLock
from typing import Any

from rosellm.errors import ClusterError, DeviceError, describe

NEED_RAY = "data_parallel_size, ray_address and --cluster"
EXTRA = "pip install 'rosellm[cluster]'"
OLDEST = (2, 50)
ANSWERS_WITHIN_S = 3.0
FREE_WITHIN_S = 10.0
STORE_BYTES = 128 * 2**20
# A local cluster: reachable only from this machine, and no usage reports.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# No prestarted worker per core, since no tasks are run; and engines do not run at low priority.
SYSTEM = {"prestart_worker_first_driver": False, "worker_niceness": 0}
# Ray finds its token by itself only for "auto". It creates one for the first local cluster, and from then on
# `ray start` protects every cluster with it.
MODE = "RAY_AUTH_MODE"
TOKEN = (
    f"; if the cluster was started with a ~/.ray/auth_token, copy that file to this host and set {MODE}=token"
)
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # RFC 9113, 3.4
SETTINGS_FRAME = 4

_lock = RLock()  # reentrant: a dropped LLM may be collected, and leave, at any time
_users = 0  # shares in a runtime that this process started or joined here


def import_ray() -> Any:
    """Import and return ``ray``. Raises ``ClusterError`` if it is missing or too old."""
    wanted = ".".join(map(str, OLDEST))
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ClusterError(f"{NEED_RAY} need Ray: {EXTRA}") from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        raise ClusterError(f"Ray {found} is too old; {wanted} or newer is needed: {EXTRA}")
    import ray
    import ray.util.scheduling_strategies

    return ray


class Runtime:
    """A reference-counted share in this process's Ray runtime.

    Ray allows one runtime per process. If one is running already, it is used and never shut down. Otherwise
    the first share joins the cluster at ``address`` ("auto": the one that Ray finds; "host:port"), or for
    None starts a local one, bound to the loopback; the last :meth:`leave` disconnects from it or shuts it
    down. n_actors: capacity of a local cluster. environment: Ray's runtime environment for this process's
    work in a cluster that is joined. Raises ``ClusterError``.
    """

    def __init__(
        self, address: str | None, n_actors: int = 1, environment: dict[str, Any] | None = None
    ) -> None:
        global _users
        self.ray = import_ray()
        self._left = False
        with _lock:
            self._is_user = _users > 0 or not self.ray.is_initialized()
            _users += self._is_user
        try:
            self._join(address, n_actors, environment)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Release the share; may be called again."""
        global _users
        with _lock:
            if self._left or not self._is_user:
                return
            self._left = True
            _users -= 1
            if not _users and self.ray.is_initialized():
                self.ray.shutdown()

    def check_running(self) -> None:
        """Raise ``ClusterError`` if Ray has been shut down."""
        if not self.ray.is_initialized():
            raise ClusterError("Ray was shut down, and the replicas with it; make another LLM")

    def device(self) -> str:
        """Return the device for the cluster's engines: "cuda" if it has a GPU, else "cpu"."""
        return "cuda" if self.ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"

    def reserve(self, kind: str, n: int, each: int) -> Places:
        """Reserve ``n`` places of ``each`` GPUs or CPUs, all or none. Raises ``DeviceError``."""
        there = int(self.ray.cluster_resources().get(kind, 0))
        wanted = f"data_parallel_size {n}" + (f" times tensor_parallel_size {each}" if each > 1 else "")
        needs = f"{wanted} needs {n * each} {kind}s" + (f", {each} of a host each" if each > 1 else "")
        if there < n * each:
            raise DeviceError(f"{needs}; the Ray cluster has {there}")
        places = Places(self.ray, kind, n, each)
        if not places.are_there(FREE_WITHIN_S):
            places.free()
            free = int(self.ray.available_resources().get(kind, 0))
            raise DeviceError(f"{needs}; {free} of the Ray cluster's {there} are free")
        return places

    def _join(self, address: str | None, n_actors: int, environment: dict[str, Any] | None) -> None:
        with _lock:
            if not self.ray.is_initialized():
                _connect(self.ray, address, n_actors, environment)
            elif address is not None:
                self._check_same(address)

    def _check_same(self, address: str) -> None:
        joined = self.ray.get_runtime_context().gcs_address
        if address != "auto" and _host_and_port(address) != _host_and_port(joined):
            raise ClusterError(
                f"Ray is connected to {joined} in this process and cannot also join {describe(address)}"
            )


class Places:
    """A placement group: the GPUs or CPUs of each replica, on one host.

    They stay reserved while a dead replica is replaced.
    """

    def __init__(self, ray: Any, kind: str, n: int, each: int) -> None:
        self._ray, self._util = ray, ray.util
        self._options = {"max_restarts": 0, "num_cpus": 0, "num_gpus": 0, f"num_{kind.lower()}s": each}
        self._group = ray.util.placement_group([{kind: each}] * n, strategy="PACK")

    def are_there(self, within_s: float) -> bool:
        return self._group.wait(within_s)

    def actor(self, index: int, kind: type, *arguments: Any) -> Any:
        """Start an actor of class ``kind`` at place ``index``; its previous actor must be gone."""
        at = self._util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        return self._ray.remote(**self._options, scheduling_strategy=at)(kind).remote(*arguments)

    def free(self) -> None:
        """Release all places; does nothing if Ray has been shut down."""
        if self._ray.is_initialized():
            self._util.remove_placement_group(self._group)


def _connect(ray: Any, address: str | None, n_actors: int, environment: dict[str, Any] | None) -> None:
    if address is not None:
        _check_answers(address)
        return _init(ray, address=address, runtime_env=environment)
    with _local_settings(ray):
        _init(
            ray,
            address="local",
            num_cpus=max(n_actors, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _system_config=SYSTEM,
        )


def _init(ray: Any, **options: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # many types: version mismatch, no token, out of memory
        of_token = TOKEN if options["address"] not in ("auto", "local") and MODE not in os.environ else ""
        raise ClusterError(f"Ray cannot be used: {_first_line(error)}{of_token}") from error


@contextmanager
def _local_settings(ray: Any) -> Iterator[None]:
    """Set the environment for starting a local cluster, and the constant Ray derived from it on import."""
    before = {name: os.environ.get(name) for name in LOCAL}
    constants = ray._private.ray_constants  # noqa: SLF001
    was, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    os.environ.update(LOCAL)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = was
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _check_answers(address: str) -> None:
    """Raise ``ClusterError`` unless a server at ``address`` answers like a Ray head.

    Ray itself would retry for a minute and then end the process.
    """
    where = _found() if address == "auto" else address
    host, port = _host_and_port(where)
    if not _speaks_http2(host, port):
        raise ClusterError(f"no Ray cluster answers at {describe(where)} within {ANSWERS_WITHIN_S:g} s")


def _found() -> str:
    """Return the address that "auto" stands for."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        raise ClusterError(
            "'auto' finds no running Ray cluster; give its host:port, or none for a local one"
        ) from None


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not colon or not host or "/" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ClusterError(
            f"the Ray address is {describe(address)}; give 'auto', or the host:port of a Ray head"
        )
    return host.strip("[]"), int(port)


def _speaks_http2(host: str, port: int) -> bool:
    """Return whether a server there opens HTTP/2, as gRPC servers do."""
    try:
        with socket.create_connection((host, port), ANSWERS_WITHIN_S) as connection:
            connection.sendall(HTTP2_HELLO)
            frame = connection.recv(4)
    except OSError:
        return False
    return len(frame) == 4 and frame[3] == SETTINGS_FRAME


def _first_line(error: BaseException) -> str:
    return describe(error).partition("\n")[0]
