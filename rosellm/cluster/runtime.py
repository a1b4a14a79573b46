"""Ray in this process: an existing runtime, a cluster joined by its address, or a new local cluster."""

from __future__ import annotations

import logging
import os
import socket
from importlib.util import find_spec
from threading import RLock
from typing import Any
from unittest.mock import patch

from rosellm.errors import ClusterError, DeviceError, describe

NEED_RAY = "data_parallel_size, ray_address and --cluster"
EXTRA = "pip install 'rosellm[cluster]'"
ANSWERS_WITHIN_S = 3.0
FREE_WITHIN_S = 10.0
STORE_BYTES = 128 * 2**20
# A local cluster: reachable only from this machine, and no usage reports.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# No prestarted worker per core, since no tasks are run; and engines do not run at low priority.
SYSTEM = {"prestart_worker_first_driver": False, "worker_niceness": 0}
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # RFC 9113, 3.4
SETTINGS_FRAME = 4

_lock = RLock()  # reentrant: garbage collection of an LLM may call ``leave`` at any time
_users: set[Runtime] = set()  # the shares in a runtime that this module started or joined


def import_ray() -> Any:
    """Import and return ``ray``. Raises ``ClusterError`` if it is missing."""
    if find_spec("ray") is None:
        raise ClusterError(f"{NEED_RAY} need Ray: {EXTRA}")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # asks for ipywidgets
    import ray
    import ray.util.scheduling_strategies

    return ray


class Runtime:
    """A reference-counted share in this process's Ray runtime.

    address: "host:port" of a cluster to join; "auto" for the cluster that Ray finds; None for a new local
        cluster, reachable only from this machine.
    n_actors: number of actors that a local cluster must have CPU cores for.
    environment: Ray's runtime environment for this process's work in a joined cluster; None for the default.

    Ray allows one runtime per process. If Ray is already running, that runtime is used and never shut down.
    Otherwise the first share starts or joins one, and the last :meth:`leave` shuts it down or disconnects
    from it. Raises ``ClusterError`` if Ray is missing, does not answer, or is connected elsewhere.
    """

    def __init__(
        self, address: str | None, n_actors: int = 1, environment: dict[str, Any] | None = None
    ) -> None:
        self.ray = import_ray()
        with _lock:
            if _users or not self.ray.is_initialized():
                _users.add(self)
            try:
                if not self.ray.is_initialized():
                    _connect(self.ray, address, n_actors, environment)
                elif address not in (None, "auto"):
                    self._check_same(address)
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        """Release the share; a second call does nothing."""
        with _lock:
            if self in _users:
                _users.remove(self)
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
        """Reserve the GPUs or CPUs of all replicas, or none of them.

        kind: "GPU" or "CPU".
        n: number of replicas.
        each: number of GPUs or CPUs of a replica, all on one host.

        Raises ``DeviceError`` if the cluster has too few, or too few become free within ``FREE_WITHIN_S``.
        """
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

    def _check_same(self, address: Any) -> None:
        joined = self.ray.get_runtime_context().gcs_address
        if _host_and_port(address) != _host_and_port(joined):
            raise ClusterError(
                f"Ray is connected to {joined} in this process and cannot also join {describe(address)}"
            )


class Places:
    """A placement group: one place per replica, whose GPUs or CPUs are on one host.

    ray: the imported module.
    kind, n, each: as in ``Runtime.reserve``.

    A place stays reserved while its replica is replaced.
    """

    def __init__(self, ray: Any, kind: str, n: int, each: int) -> None:
        self._ray, self._util = ray, ray.util
        self._options = {"max_restarts": 0, "num_cpus": 0, "num_gpus": 0, f"num_{kind.lower()}s": each}
        self._group = ray.util.placement_group([{kind: each}] * n, strategy="PACK")

    def are_there(self, within_s: float) -> bool:
        return self._group.wait(within_s)

    def actor(self, index: int, kind: type, *arguments: Any) -> Any:
        """Start and return an actor of class ``kind`` at place ``index``; its previous actor must be gone."""
        at = self._util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        return self._ray.remote(**self._options, scheduling_strategy=at)(kind).remote(*arguments)

    def free(self) -> None:
        """Release all places; does nothing if Ray has been shut down."""
        if self._ray.is_initialized():
            self._util.remove_placement_group(self._group)


def _connect(ray: Any, address: str | None, n_actors: int, environment: dict[str, Any] | None) -> None:
    """Join the cluster at ``address``, or start a local one if it is None. Raises ``ClusterError``."""
    if address is not None:
        _check_answers(address)
        return _init(ray, address=address, runtime_env=environment)
    cpus = max(n_actors, os.cpu_count() or 1)
    sizes = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "_system_config": SYSTEM}
    constants = ray._private.ray_constants  # noqa: SLF001 (Ray read the environment on import)
    with patch.dict(os.environ, LOCAL), patch.object(constants, "ENABLE_RAY_CLUSTER", False):
        _init(ray, address="local", include_dashboard=False, **sizes)


def _init(ray: Any, **options: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # many types: version mismatch, no token, out of memory
        raise ClusterError(f"Ray cannot be used: {describe(error)}") from error


def _check_answers(address: str) -> None:
    """Raise ``ClusterError`` unless a server at ``address`` answers in HTTP/2, as a Ray head's gRPC does.

    If none answers, Ray itself would retry for a minute and then end the process.
    """
    where = _found() if address == "auto" else address
    try:
        with socket.create_connection(_host_and_port(where), ANSWERS_WITHIN_S) as connection:
            connection.sendall(HTTP2_HELLO)
            frame = connection.recv(4)
    except OSError:
        frame = b""
    if len(frame) < 4 or frame[3] != SETTINGS_FRAME:
        raise ClusterError(f"no Ray cluster answers at {describe(where)} within {ANSWERS_WITHIN_S:g} s")


def _found() -> str:
    """Return the address of the cluster that Ray finds by itself. Raises ``ClusterError`` without one."""
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
