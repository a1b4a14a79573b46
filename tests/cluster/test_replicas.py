"""``LLM(data_parallel_size=2)`` on Ray's local cluster, shared: one engine's answers, whoever dies."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import psutil
import pytest

from rosellm import LLM, SamplingParams
from rosellm.cluster import seats as seats_module
from rosellm.errors import ClusterError, DeviceError, OptionError, PromptError, RecipeError
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.serving.streaming import StreamingManager
from tests.roseinfer.ranks import is_running, program

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'rosellm[cluster]'")

PROMPTS = ["import os\n", "def main(", [5, 6, 7], "class A:", "for i in range(", "return"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
    SamplingParams(max_tokens=30, seed=1, n=3),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=10, seed=2),
    SamplingParams(temperature=0.0, max_tokens=25, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=40, stop="("),
    SamplingParams(temperature=0.7, min_p=0.1, max_tokens=1, seed=4, ignore_eos=True),
]
LONG = [SamplingParams(max_tokens=80, seed=i, ignore_eos=True) for i in range(12)]
CPUS = 10
ENDS_WITHIN_S = 90.0  # on a busy machine

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads process titles as Linux has them")
pytestmark = [needs_linux, pytest.mark.slow]  # notebook 36 starts two replicas and kills one in make test


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The first one starts the cluster, with room for those of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: CPUS)
        first = LLM(device="cpu", data_parallel_size=2)
    yield first
    ray.shutdown()


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(device="cpu")


def commands_below(pid: int) -> dict[int, str]:
    """The command lines of all living descendants of a process, by process id."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
    return found


def actors() -> set[int]:
    """Processes of replicas on the cluster, which is this process's child."""
    return {pid for pid, command in commands_below(os.getpid()).items() if command.startswith("ray::Replica")}


def until(holds: Callable[[], bool]) -> None:
    end = monotonic() + ENDS_WITHIN_S
    while not holds():
        assert monotonic() < end
        sleep(0.05)


def settled() -> set[int]:
    """The two of ``llm``, once each is there."""
    until(lambda: len(actors()) == 2)
    return actors()


@pytest.fixture(scope="module")
def expected(one: LLM) -> list[RequestOutput]:
    return one.generate(PROMPTS, PARAMS, use_tqdm=False)


def assert_same(outputs, expected) -> None:
    assert outputs == expected
    for output, other in zip(outputs, expected, strict=True):
        assert (output.prompt, output.outputs) == (other.prompt, other.outputs)
        assert [own.text for own in output.outputs] == [own.text for own in other.outputs]


def test_outputs_are_those_of_one_engine_in_the_order_of_the_requests(llm, one, expected, capfd):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_same(outputs, expected)
    assert [len(output.outputs) for output in outputs] == [1, 3, 1, 1, 1, 1]
    assert [list(each) for each in outputs[0].logprobs] == [list(each) for each in expected[0].logprobs]
    assert 0 < outputs[0].metrics.ttft <= outputs[0].metrics.latency < 60
    assert llm.rung == one.rung and llm.generate([], use_tqdm=False) == []
    unseeded = llm.generate(["def "] * 3, SamplingParams(max_tokens=12))
    assert len({tuple(output.token_ids) for output in unseeded}) == 3
    assert "100%" in capfd.readouterr().err  # the bar


def test_logprobs_of_prompts_come_from_the_replicas(llm, one):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    theirs, ours = (each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, one))
    for their, our in zip(theirs, ours, strict=True):
        assert [None if e is None else [*e] for e in their.prompt_logprobs] == [
            None if e is None else [*e] for e in our.prompt_logprobs
        ]


def test_a_replica_killed_in_mid_run_is_replaced_and_all_are_answered_once(llm, one, expected, monkeypatch):
    victim, other = settled()
    counted = []

    class Killer(nullcontext):
        """In place of tqdm's bar."""

        total = 0

        def __init__(self, **_options: object) -> None:
            super().__init__(self)

        def update(self, n: int) -> None:
            if not counted:
                os.kill(victim, signal.SIGKILL)
            counted.append(n)

    with monkeypatch.context() as patch:
        patch.setattr("rosellm.roseinfer.llm.tqdm", Killer)
        outputs = llm.generate(PROMPTS * 2, LONG)
    assert_same(outputs, one.generate(PROMPTS * 2, LONG, use_tqdm=False))
    assert sum(counted) == sum(own.max_tokens for own in LONG)
    assert victim not in settled()
    os.kill(other, signal.SIGKILL)  # the new one is left
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)


def streamed(manager: StreamingManager, prompts: list, params: list[SamplingParams]) -> list[str]:
    """The texts of these requests, each joined from its pieces."""
    ids = [manager.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    return ["".join(manager.stream_text(request_id)) for request_id in ids]


def test_replicas_of_two_ranks_each_give_the_tokens_of_one_engine_though_a_rank_is_killed(llm, one):
    before = settled()
    pairs = LLM(device="cpu", rung="split_kv", max_batch_size=8, data_parallel_size=2, tensor_parallel_size=2)
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 6
    wanted = [output.text for output in one.generate(PROMPTS, params, use_tqdm=False)]
    with StreamingManager(pairs) as manager:
        assert streamed(manager, PROMPTS, params) == wanted
        ranks = other_ranks(actors() - before)
        assert len(ranks) == 2
        request = manager.add_request(PROMPTS[0], params[0])
        os.kill(min(ranks), signal.SIGKILL)
        assert streamed(manager, PROMPTS, params) == wanted
        assert manager.result(request).text == wanted[0]
    ranks |= other_ranks(actors() - before)
    del pairs, manager
    until(lambda: actors() == before and not any(map(is_running, ranks)))


def test_of_eight_replicas_two_are_killed_and_all_requests_are_answered(llm, one):
    before = settled()
    eight = LLM(device="cpu", max_batch_size=4, data_parallel_size=8)
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * len(PROMPTS)
    wanted = [output.text for output in one.generate(PROMPTS, params, use_tqdm=False)]
    with StreamingManager(eight) as manager:
        assert streamed(manager, PROMPTS, params) == wanted
        first = actors() - before
        assert len(first) == 8
        ids = [manager.add_request(*each) for each in zip(PROMPTS * 4, params * 4, strict=True)]
        for victim in sorted(first)[:2]:
            os.kill(victim, signal.SIGKILL)
        assert [manager.result(request_id).text for request_id in ids] == wanted * 4
        until(lambda: len(actors() - before) == 8)
        assert len(actors() & first) == 6
    del eight, manager
    gc.collect()
    until(lambda: actors() == before)


def other_ranks(replicas: set[int]) -> set[int]:
    """Process ids of the ranks that the replicas' first ones have started."""
    below = [item for pid in replicas for item in commands_below(pid).items()]
    return {pid for pid, command in below if "spawn_main" in command}


@pytest.mark.parametrize(
    ("error", "options", "told"),
    [
        (OptionError, {"block_size": 3}, "block_size is 3; it must be a power"),
        (DeviceError, {"data_parallel_size": 11}, f"11 needs 11 CPUs; the Ray cluster has {CPUS}"),
        (ClusterError, {"ray_address": "127.0.0.1:1"}, "cannot also join '127.0.0.1:1'"),
        (RecipeError, {"tensor_parallel_size": 2, "rung": "cuda_graph"}, "needs rung 'fused_append'"),
    ],
)
def test_bad_options_are_one_line_each_and_leave_no_process(llm, error, options, told):
    before = settled()
    with pytest.raises(error, match=told):
        LLM(**{"device": "cpu", "data_parallel_size": 1, "ray_address": "auto"} | options)
    until(lambda: actors() == before)


def test_a_replica_that_cannot_be_loaded_is_told_and_leaves_no_process(llm, monkeypatch):
    before = settled()

    def kill_the_new_one() -> None:
        until(lambda: actors() - before)
        for pid in actors() - before:
            os.kill(pid, signal.SIGKILL)

    killer = Thread(target=kill_the_new_one)
    killer.start()
    with pytest.raises(ClusterError, match="a replica died while loading: .* The actor died unexpectedly"):
        LLM(device="cpu", data_parallel_size=1, ray_address="auto")
    killer.join()
    monkeypatch.setattr(seats_module, "LOADS_WITHIN_S", 0.05)
    with pytest.raises(ClusterError, match="the replicas did not load within 0.05 s"):
        LLM(device="cpu", data_parallel_size=1, ray_address="auto")
    until(lambda: actors() == before)


def test_a_dropped_llm_ends_its_actors_and_no_others(llm, one):
    before = settled()
    second = LLM(device="cpu", data_parallel_size=1, ray_address="auto", prefix_cache=True, block_size=16)
    assert len(actors()) == 3
    prompts = [[3] * 40 + [i] for i in range(4)] + [[4] * 40 + [i] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=5)
    with pytest.raises(PromptError):
        second.generate([9999], use_tqdm=False)
    for _ in range(2):
        assert_same(
            second.generate(prompts, params, use_tqdm=False), one.generate(prompts, params, use_tqdm=False)
        )
    del second
    until(lambda: actors() == before)
    assert ray.is_initialized()


SERVERS = ("gcs_server", "raylet", "dashboard.py", "DashboardAgent", "RuntimeEnvAgent", "monitor.py")


def test_everything_listens_on_the_loopback_only(llm):
    below = commands_below(os.getpid()).items()
    servers = [next(pid for pid, command in below if name in command) for name in SERVERS]
    places = {
        connection.laddr.ip.removeprefix("::ffff:")
        for pid in {*settled(), *servers}
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert places and places <= {"127.0.0.1", "::1"}


DRIVER = """
import sys
from rosellm import LLM, SamplingParams
llm = LLM(device="cpu", data_parallel_size=1, ray_address=sys.argv[1])
llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
print("ready", flush=True)
while True:
    llm.generate(["a"] * 64, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


def test_ctrl_c_leaves_no_orphan_and_a_cluster_that_we_did_not_start_goes_on(llm, expected):
    before, address = settled(), ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # it is on the loopback
    if Path("~/.ray/auth_token").expanduser().exists():  # then Ray protects every cluster with it
        environment |= {"RAY_AUTH_MODE": "token"}
    with program("-c", DRIVER, address, env=environment) as driver:
        assert driver.stdout.readline() == "ready\n", driver.stderr.read()
        until(lambda: len(actors() - before) == 1)
        sleep(0.5)
        driver.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in driver.communicate(timeout=ENDS_WITHIN_S)[1]
    until(lambda: actors() == before)
    assert_same(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
