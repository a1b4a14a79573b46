"""What needs Ray says so in one line, soon, and before anything is started."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from time import monotonic
from unittest.mock import MagicMock

import pytest

from rosellm import LLM
from rosellm.cluster import runtime
from rosellm.errors import CheckpointError, ClusterError, DeviceError, OptionError

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason=runtime.EXTRA)


def refused(error: type[Exception], **options) -> str:
    """The one line that refuses these options, within seconds."""
    begin = monotonic()
    with pytest.raises(error) as told:
        LLM(**({"device": "cpu", "data_parallel_size": 2} | options))
    assert monotonic() - begin < 2 * runtime.ANSWERS_WITHIN_S + 10
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("n", [0, 1.0, True, "2", None, 10**30])
def test_a_number_of_replicas_that_makes_no_sense_is_refused(n):
    assert "it must be a whole number from 1 to 1024" in refused(OptionError, data_parallel_size=n)


@pytest.mark.parametrize(
    ("error", "options", "told"),
    [
        (CheckpointError, {"model": "/nowhere"}, "no folder on this machine"),
        (DeviceError, {"device": "tpu"}, "'tpu' is unknown"),
        (CheckpointError, {"load_format": "odd"}, "load_format 'odd' is unknown"),
        (OptionError, {"tensor_parallel_size": 3}, "3 does not divide the model's 4 attention heads"),
        (OptionError, {"tensor_parallel_size": 0}, "it must be a whole number from 1 to 64"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_ray_is_started(error, options, told, monkeypatch):
    monkeypatch.setattr(runtime, "import_ray", lambda: pytest.fail("Ray would have been started"))
    assert told in refused(error, **options)


def test_a_missing_ray_is_told_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(runtime, "find_spec", lambda _name: None)
    told = "data_parallel_size, ray_address and --cluster need Ray: pip install 'rosellm[cluster]'"
    assert refused(ClusterError) == refused(ClusterError, data_parallel_size=1, ray_address="auto") == told


@needs_ray
@pytest.mark.parametrize("accepts", [True, False], ids=["silent", "closed"])
def test_an_address_where_no_ray_answers_is_refused(accepts, monkeypatch):
    monkeypatch.setattr(runtime, "ANSWERS_WITHIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1] if accepts else 1}"
        told = f"no Ray cluster answers at {address!r} within 0.5 s"
        assert refused(ClusterError, ray_address=address) == told
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert address.partition(":")[2] + "' within 0.5 s" in refused(ClusterError, ray_address="auto")


@needs_ray
@pytest.mark.parametrize("address", ["", "here", "ray://head:10001", ":6379", "head:99999", 7, "a:²"])
def test_a_malformed_address_is_refused(address):
    assert "give 'auto', or the host:port of a Ray head" in refused(ClusterError, ray_address=address)


@needs_ray
def test_auto_without_a_cluster_is_refused(monkeypatch):
    def none(_address: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", none)
    assert "'auto' finds no running Ray cluster" in refused(ClusterError, ray_address="auto")


@needs_ray
def test_what_ray_itself_refuses_is_one_line(monkeypatch):
    def init(**_options: object) -> None:
        raise ConnectionError("Failed to connect\nand more")

    monkeypatch.setattr("ray.init", init)
    assert refused(ClusterError) == "Ray cannot be used: ConnectionError: Failed to connect"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What a share needs of Ray, on a cluster of 4 CPUs of which 1 is free."""
    ray = MagicMock()
    ray.is_initialized.return_value = False
    ray.init.side_effect = lambda **_: ray.is_initialized.configure_mock(return_value=True)
    ray.shutdown.side_effect = lambda: ray.is_initialized.configure_mock(return_value=False)
    ray.cluster_resources.return_value, ray.available_resources.return_value = {"CPU": 4.0}, {"CPU": 1.0}
    monkeypatch.setattr(runtime, "import_ray", lambda: ray)
    monkeypatch.setattr(runtime, "_check_answers", lambda _address: None)
    return ray


def test_the_last_share_ends_what_the_first_one_started(ray):
    first, second = runtime.Runtime(None, 2), runtime.Runtime(None, 2)
    first.leave()
    first.leave()
    assert ray.init.call_count == 1 and not ray.shutdown.called and second.check_running() is None
    second.leave()
    assert ray.shutdown.call_count == 1
    with pytest.raises(ClusterError, match="Ray was shut down, and the replicas with it; make another LLM"):
        second.check_running()


def test_a_runtime_that_was_there_is_never_ended(ray):
    ray.is_initialized.return_value = True
    for share in [runtime.Runtime(None, 2) for _ in range(2)]:
        share.leave()
    assert not ray.init.called and not ray.shutdown.called


def test_a_cluster_of_ours_is_told_to_stay_on_the_loopback_and_report_to_nobody(monkeypatch, ray):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    told, constants = {}, ray._private.ray_constants
    constants.ENABLE_RAY_CLUSTER = True

    def init(**_options: object) -> None:
        told.update(
            {name: os.environ.get(name) for name in runtime.LOCAL}, cluster=constants.ENABLE_RAY_CLUSTER
        )

    ray.init.side_effect = init
    runtime.Runtime(None, 2).leave()
    assert told == runtime.LOCAL | {"cluster": False}
    assert constants.ENABLE_RAY_CLUSTER and os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    assert not set(runtime.LOCAL) <= set(os.environ)


def test_a_start_that_fails_keeps_no_share(ray):
    works, ray.init.side_effect = ray.init.side_effect, ConnectionError("no")
    with pytest.raises(ClusterError):
        runtime.Runtime("nowhere:1", 2)
    ray.init.side_effect = works
    runtime.Runtime(None, 2).leave()
    assert ray.shutdown.call_count == 1


@pytest.mark.parametrize(
    ("kind", "n", "each", "told"),
    [
        ("CPU", 5, 1, "data_parallel_size 5 needs 5 CPUs; the Ray cluster has 4"),
        ("CPU", 3, 2, "3 times tensor_parallel_size 2 needs 6 CPUs, 2 of a host each; the Ray cluster has 4"),
        ("GPU", 1, 1, "data_parallel_size 1 needs 1 GPUs; the Ray cluster has 0"),
        ("CPU", 2, 2, "needs 4 CPUs, 2 of a host each; 1 of the Ray cluster's 4 are free"),
    ],
)
def test_more_replicas_than_the_cluster_has_or_has_free_are_refused_and_keep_nothing(
    ray, kind, n, each, told
):
    ray.util.placement_group.return_value.wait.return_value = False
    share = runtime.Runtime("auto", 2)
    with pytest.raises(DeviceError, match=told):
        share.reserve(kind, n, each)
    assert ray.util.remove_placement_group.call_count == ray.util.placement_group.call_count
    share.leave()
    assert ray.init.call_args.kwargs["address"] == "auto" and ray.shutdown.called
