"""The step ledger: every microsecond of a step has one cause, and the causes sum up to the step."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rosellm
from rosellm.lab.figures.palette import CAUSES
from rosellm.lab.records.account import LedgerError, account
from rosellm.lab.records.bench import Bench, get_model, make_prompts
from rosellm.lab.records.floors import BLOCK, Ceiling, floors_us, prefill_floors_us, sum_blocks
from rosellm.lab.records.ledger import Ledger, of_unprofiled, step_ledger, tokens_needed
from rosellm.lab.records.records import find, floor_us
from rosellm.lab.records.roles import by_place, kernel_role, operator_role
from rosellm.lab.records.trace import PROFILED_STEP, Event, Trace, read_trace
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.steps.step import STEP_RANGE
from tests.helpers import TRITON_DEVICES
from tests.ledgers import ROWS, ledger_of


def kernel(name: str, start: float, duration: float, launched: float, kind: str = "kernel") -> Event:
    return Event(name, kind, start, duration, launched)


def on_host(name: str, start: float, end: float, kind: str = "range") -> Event:
    return Event(name, kind, start, end - start, start)


def steps(n: int, length: float) -> list[Event]:
    return [on_host(PROFILED_STEP, i * length, (i + 1) * length) for i in range(n)]


def microseconds(trace: Trace) -> dict[str, float]:
    return {row.cause: row.us for row in account(trace)}


def host_driven(t: float) -> list[Event]:
    """A step of 100 µs from ``t`` on, launched kernel by kernel; 25 µs later its first kernel starts."""
    return [
        on_host(STEP_RANGE, t + 5, t + 95),
        on_host(f"{STEP_RANGE}.reserve", t + 5, t + 15),
        on_host(f"{STEP_RANGE}.model", t + 15, t + 60),
        on_host(f"{STEP_RANGE}.sample", t + 60, t + 90),
        on_host("cudaStreamSynchronize", t + 62, t + 70, kind="sync"),
        kernel("_embed_kernel", t + 25, 5, launched=t + 20),
        kernel("_add_norm_kernel", t + 32, 8, launched=t + 28),
        kernel("nvjet_hsh_64x8", t + 45, 15, launched=t + 42),
        kernel("Memcpy DtoH (Device -> Pinned)", t + 64, 2, launched=t + 62, kind="copy"),
    ]


def test_every_microsecond_of_a_host_driven_step_has_its_cause():
    events = steps(3, 100) + [e for t in (0, 100, 200) for e in host_driven(t)]
    assert microseconds(Trace(events)) == {
        "embedding": 5,
        "norm": 8,
        "head": 15,
        "copy DtoH": 2,
        "between kernels": 2,  # the norm was launched while the embedding ran
        "launch latency": 3 + 2 + 5,
        "synchronisation": 4,  # from the copy's end until the host goes on
        "host: model": 2 + 5,
        "host: sample": 2 + 20,
        "host: between the step's parts": 5,
        "host: outside the step": 10,
        "host: reserve": 10,
    }


def test_rows_sum_up_to_the_quieter_half_of_the_distances_of_first_kernels():
    late = [e for e in host_driven(207) if e.kind != "sync"]
    last = [e for e in host_driven(300) if e.kind != "sync"]
    rows = account(Trace(steps(4, 100) + host_driven(0) + host_driven(100) + late + last))
    assert sum(row.us for row in rows) == pytest.approx((100 + 93) / 2)  # of 100, 107 and 93
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert {row.cause: row.launches for row in rows}["norm"] == 1


@pytest.mark.parametrize(
    ("step_us", "on_gpu", "us"),
    [
        (90.0, True, [60, 10, 5, 9, 3.6, 2.4]),  # kernels stay as they are, idle time shrinks
        (60.0, True, [48, 8, 4, 0, 0, 0]),  # kernels that the profiler kept from overlapping shrink alike
        (50.0, False, [30, 5, 2.5, 7.5, 3, 2]),  # on a CPU the profiler slows operators, too
    ],
)
def test_rows_are_rescaled_to_an_unprofiled_step(step_us, on_gpu, us):
    rows = of_unprofiled(ROWS, step_us, on_gpu)
    assert [row.us for row in rows] == pytest.approx(us)
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_overlapped_time_belongs_to_the_kernel_that_started_first():
    chain = [("_embed_kernel", 0, 10), ("_add_norm_kernel", 4, 11), ("gelu", 6, 3), ("nvjet", 15, 5)]
    events = steps(2, 20)
    for t in (0, 20):
        events += [kernel(name, t + at, d, launched=t) for name, at, d in chain]
    rows = {row.cause: (row.us, row.launches) for row in account(Trace(events))}
    assert rows == {"embedding": (10, 1), "norm": (5, 1), "elementwise": (0, 1), "head": (5, 1)}


def test_gaps_inside_a_graph_that_was_launched_ahead_are_between_kernels():
    """Both graphs are launched at once; the second one's kernels start when the first one's have ended."""
    events = [on_host(PROFILED_STEP, 0, 3), on_host(PROFILED_STEP, 3, 6)]
    for launched, t in ((1, 10), (4, 40)):
        events += [kernel("_add_norm_kernel", t, 10, launched), kernel("nvjet", t + 11, 17, launched)]
    assert microseconds(Trace(events)) == {"norm": 10, "head": 17, "between kernels": 1 + 2}


def test_what_overhangs_the_profiled_steps_is_cut_off_and_the_unknown_is_not_named():
    events = [*steps(2, 10), kernel("mystery", 4, 1, 4)]
    events += [kernel("Memcpy HtoD", -3, 5, -4, "copy"), kernel("gelu", 0, 4, 0), kernel("gelu", 10, 4, 10)]
    events += [kernel("Memcpy DtoH", 8, 9, 7, "copy")]
    rows = account(Trace(events))
    us = {row.cause: row.us for row in rows}
    assert (us["copy HtoD"], us["copy DtoH"], us["elementwise"]) == (2, 2, 2)
    assert sum(us.values()) == 10
    ledger = ledger_of(rows)
    assert (ledger.named, ledger.unknown, ledger.busy) == pytest.approx((0.6, 0.1, 0.7))


def test_on_a_cpu_operators_and_the_host_between_them_make_the_step():
    events = steps(2, 50)
    for t in (0, 50):
        events += [
            on_host(STEP_RANGE, t + 2, t + 48),
            on_host(f"{STEP_RANGE}.model", t + 10, t + 40),
            on_host("aten::embedding", t + 12, t + 15, "op"),
            on_host("aten::layer_norm", t + 16, t + 20, "op"),
            on_host("aten::linear", t + 20, t + 30, "op"),
            on_host("aten::argmax", t + 41, t + 44, "op"),
        ]
    assert microseconds(Trace(events)) == {
        "embedding": 3,
        "norm": 4,
        "head": 10,
        "sampling": 3,
        "host: model": 2 + 1 + 10,
        "host: between the step's parts": 8 + 1 + 4,
        "host: outside the step": 4,
    }


def test_a_trace_without_two_steps_or_with_one_that_launched_nothing_is_refused():
    with pytest.raises(LedgerError, match="holds 1 steps; a ledger needs two"):
        account(Trace(steps(1, 10)))
    with pytest.raises(LedgerError, match="launched no kernel"):
        account(Trace([*steps(2, 10), kernel("gelu", 1, 2, 1)]))


KERNELS = {
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
    "_persistent_layers_kernel": "layers",
    "void at::native::index_elementwise_kernel<128, 4, index_put_kernel_impl<...>>": "put",
    "nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT": "GEMM",
    "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4>": "GEMM",
    "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64": "GEMM",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>": "norm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": "elementwise",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>": "elementwise",
    "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::Half, int>": "embedding",
    "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>": "embedding",
    "void at::native::reduce_kernel<512, 1, ReduceOp<ArgMaxOps<float>>>": "sampling",
    "void cub::DeviceRadixSortOnesweepKernel<...>": "sampling",
    "mystery": "other",
}
OPERATORS = {
    "addmm": "GEMM",
    "mkldnn::_linear_pointwise": "GEMM",
    "aten::index_put_": "put",
    "aten::__or__": "elementwise",
    "aten::add_": "elementwise",
    "nothing": "other",
}


def test_library_kernels_and_operators_are_known_by_their_names():
    assert {name: kernel_role(name) for name in KERNELS} == KERNELS
    assert {name: operator_role(name) for name in OPERATORS} == OPERATORS


def test_every_triton_kernel_of_a_step_says_its_own_role():
    package, found = Path(rosellm.__file__).parent, {}
    for path in package.glob("rose*/**/*.py"):
        names = re.findall(r"^@triton\.jit[^@]*?^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
        if names:
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            roles = importlib.import_module(module).ROLES
            assert sorted(roles) == sorted(names), module
            found |= roles
    assert len(found) >= 15 and set(found.values()) <= CAUSES.keys()
    assert {name: kernel_role(name) for name in found} == found


def test_ambiguous_work_takes_the_role_of_its_neighbours():
    qkv = ["views", "embedding", "elementwise", "norm", "GEMM"]
    attention = ["views", "elementwise", "product", "softmax", "product", "views"]
    rest = ["product", "elementwise", "norm", "GEMM", "elementwise", "product"]
    end = ["norm", "product", "elementwise", "softmax", "other"]
    assert by_place(qkv + attention + rest + end) == [
        "inputs", "embedding", "elementwise", "norm", "GEMM", *["attention"] * 6, "GEMM",
        "elementwise", "norm", "GEMM", "elementwise", "GEMM", "norm", "head", "sampling", "sampling", "other",
    ]  # fmt: skip
    layer = ["norm", "GEMM", "views", "elementwise", "put", "elementwise", "put", "attention", "GEMM"]
    assert by_place([*layer, "norm", "GEMM", "elementwise", "put"]) == [
        "norm", "GEMM", *["append"] * 5, "attention", "GEMM", "norm", "head", "sampling", "sampling",
    ]  # fmt: skip


def test_a_kernel_takes_the_role_of_the_range_or_the_operator_that_launched_it():
    plain = "void at::native::vectorized_elementwise_kernel<4>"
    events = steps(2, 30)
    for t in (0, 30):
        events += [
            on_host(f"{STEP_RANGE}.model", t, t + 10),
            on_host("aten::softmax", t + 1, t + 3, "op"),
            on_host(f"{STEP_RANGE}.kv_append", t + 10, t + 20),
            kernel(plain, t + 10, 6, launched=t + 2),
            kernel(plain, t + 16, 24, launched=t + 12),
        ]
    assert microseconds(Trace(events)) == {"attention": 6, "append": 24}


def test_a_trace_file_tells_where_the_host_waited_for_the_device(tmp_path):
    wait = {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 5, "dur": 2}
    wait["args"] = {"correlation": 1}
    launch = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 1, "args": {"correlation": 7}}
    nodes = [{"cat": "kernel", "name": "k", "ts": at, "dur": 1, "args": {"correlation": 7}} for at in (3, 4)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [wait, launch, *nodes]}))
    trace = read_trace(path)
    assert [(e.start, e.duration) for e in trace.of("sync")] == [(5, 2)]
    assert [e.started for e in trace.of("kernel")] == [1, 1]  # nodes of a graph: when the graph was launched


def test_a_ledger_survives_its_record_and_a_disturbed_one_says_so():
    ledger = ledger_of(ROWS, busy_us=109.0)
    record = json.loads(json.dumps(ledger.as_dict()))
    assert Ledger.from_dict(record) == ledger and not ledger.is_disturbed
    assert record["floor_us"] == 35
    assert record["busy"] == record["named"] == pytest.approx(0.75)
    disturbed = replace(ledger, busy_us=111.0)
    assert disturbed.is_disturbed and "compare nothing" in disturbed.cross_check


def test_a_floor_is_set_by_bytes_or_by_operations_whichever_take_longer():
    results, shape = find(), KNOWN_SHAPES["gpt2"]
    bytes_per_us = max(results.load("ceilings")["figures"]["read_TB_s"]) * 1e6
    floors = floors_us(shape, 64, 1 + 256, 2, Ceiling(bytes_per_us, 1e12))
    together = floors["GEMM"] + floors["head"] + floors["attention"]
    assert floor_us(results, "W2") < together < floor_us(results, "W2") * 1.1  # which has no activations
    slow = floors_us(shape, 1024, 1, 2, Ceiling(4e6, 1e6))
    assert slow["head"] == 2 * 1024 * shape.vocab_size * shape.d_model / 1e6


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_what_is_timed_as_reading_reads_all_of_it(device):
    source = torch.randint(-1000, 1000, (3, BLOCK), dtype=torch.int32, device=device)
    sums = sum_blocks(source.flatten(), torch.full((3,), 7, dtype=torch.int32, device=device))
    assert torch.equal(sums, source.sum(1, dtype=torch.int32))


def test_a_prefills_tokens_attend_to_those_before_them_and_the_last_ones_pass_the_head():
    by_flops = Ceiling(1e30, 1.0)
    for window, pairs in ((None, 1 + 2 + 3 + 4), (2, 1 + 2 + 2 + 2)):
        shape = replace(KNOWN_SHAPES["Qwen/Qwen3-0.6B"], window=window)
        floors = prefill_floors_us(shape, 3, 4, 2, by_flops)
        assert floors["attention"] == 4 * 3 * pairs * shape.n_layers * shape.attention_width
        assert floors["head"] == 2 * 3 * shape.vocab_size * shape.d_model


@pytest.fixture(scope="module")
def tiny():
    return get_model("rose-tiny", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["dense", "reused_index_buffers", "resident_step", BEST_RUNG, "one_pass"])
def test_a_live_step_on_a_cpu_is_accounted_for(tiny, rung):
    prompts = make_prompts(4, [3, 9], tiny.config.vocab_size)
    ledger = step_ledger(Bench(tiny, rung, prompts, tokens_needed(3) + 1), steps=3)
    launches = {row.cause: row.launches for row in ledger.rows}
    layers = tiny.config.n_layers
    assert (launches["GEMM"], launches["norm"], launches["head"]) == (4 * layers, 2 * layers + 1, 1)
    assert "attention" in launches and ledger.unknown == 0
    assert sum(row.us for row in ledger.rows) == pytest.approx(ledger.step_us)
    assert ledger.floor_us is None and not ledger.on_gpu and ledger.profiled_us > 0
    assert any(".forward" in f.name or "_ref" in f.name for f in ledger.functions)
    assert 0.2 * ledger.step_us < sum(function.us for function in ledger.functions)


def test_too_little_room_and_bad_numbers_of_steps_are_told(tiny):
    bench = Bench(tiny, "paged", make_prompts(1, 2, tiny.config.vocab_size), 12)
    with pytest.raises(
        LedgerError, match="decodes 26 tokens per sequence, and the bench has room for 11; give it 15"
    ):
        step_ledger(bench, steps=3)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(LedgerError, match="whole number, 1 or more"):
            step_ledger(bench, steps=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", list(LADDER))
def test_a_live_step_on_a_gpu_is_accounted_for(rung):
    model = get_model("rose-tiny", "cuda")
    prompts = make_prompts(8, [3, 9], model.config.vocab_size)
    ledger = step_ledger(Bench(model, rung, prompts, tokens_needed(4) + 1, gate_from=1), steps=4)
    rows = {row.cause: row for row in ledger.rows}
    assert ledger.on_gpu and ledger.unknown <= 0.05 * ledger.busy
    assert sum(row.us for row in ledger.rows) == pytest.approx(ledger.step_us)
    if rung == "persistent_kernel":
        assert rows["layers"].launches == 1
    else:
        assert rows["GEMM"].launches >= 4 * model.config.n_layers
        assert rows["attention"].launches >= model.config.n_layers
    assert rows["head"].us > 0
    assert 0 < ledger.floor_us < ledger.step_us
