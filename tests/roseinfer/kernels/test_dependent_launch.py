"""Programmatic dependent launch: what the compiler makes of it, and a whole decode step launched so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.attention_plan import ring_rows, variant_for
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels
from rosellm.roseinfer.layers.fused import build_layers
from tests.helpers import FAMILIES, random_model, small_config
from tests.roseinfer.kernels import compile_step_kernels
from tests.roseinfer.kernels.compile_step_kernels import SHARED_MEMORY
from tests.roseinfer.kernels.kernel_checks import assert_near
from tests.roseinfer.kernels.paged_cases import CACHES
from tests.roseinfer.kernels.test_filtered import OTHERS, RULES, make_state, random_logits

ROOT, REPLAYS = Path(__file__).parents[3], 50
KERNELS = {"_embed", "_add_norm", "_few_rows", "_some_rows", "_silu_mul", "_position_heads", "_plan"}
KERNELS |= {"_decode_attention", "_combine_pieces", "_best_tokens", "_advance", "_choose_filtered"}
KERNELS |= {"_count_tokens", "_filtered_tiles", "_prefill_attention", "_combine_tiles"}
KERNELS |= {"_match", "_expand", "_choose", "_accept", "_uncached"}
KERNELS |= {"_copy_counts", "_count_drafts", "_sum_add_norm"}
OF_CAPABILITY = {
    89: {"_dequantize", "_round_heads", "_widen"},
    90: {"_ring", "_grouped_ring", "_ring_attention", "_verify_attention", "_quantize", "_round_heads"},
}
OF_CAPABILITY[90] |= {"_dequantize_groups", "_widen", "_prefill_ring"}
ORDINARY = {"_dequantize_groups_kernel"}  # before a GEMM by the vendor's library
RELEASE_FIRST = {"_add_norm_kernel", "_sum_add_norm_kernel", "_quantize_kernel"}


@pytest.fixture
def compiled(capability, tmp_path, pytestconfig) -> list[tuple[str, str, bool, int, list[str]]]:
    """Kernel, PTX, dependent, shared bytes, pointers, as the wrappers launch them on a GPU of ``capability``.

    Compiled once for the same kernels: pytest's cache keeps the result.
    """
    name = f"compiled/{capability}-{kernels_digest()}"
    if (kept := pytestconfig.cache.get(name, None)) is not None:
        return kept
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "DISABLE_PTXAS_OPT": "1"}  # a fifth of the time
    script = "tests.roseinfer.kernels.compile_step_kernels"
    command = [sys.executable, "-m", script, str(capability), str(tmp_path / "ptx.json")]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=1800)
    made = json.loads((tmp_path / "ptx.json").read_text())
    pytestconfig.cache.set(name, made)
    return made


def kernels_digest() -> str:
    """Of all that a kernel is compiled from: the sources of engine and models, the script, the compiler."""
    rooms = [ROOT / "rosellm" / room for room in ("roseinfer", "models", "rosetrainer")]
    sources = [path for room in rooms for path in room.rglob("*.*") if path.suffix in (".py", ".json")]
    digest = sha256(triton.__version__.encode())
    for path in sorted([*sources, Path(compile_step_kernels.__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def places(pattern: str, ptx: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, ptx)]


def assert_waits_once_then_releases_once_then_writes(name: str, ptx: str) -> None:
    """Those that a GEMM or the head follows release it first."""
    waits, releases = (places(rf"griddepcontrol\.{what}", ptx) for what in ("wait", "launch_dependents"))
    assert len(waits) == len(releases) == 1 and (waits < releases) == (name not in RELEASE_FIRST), name
    writes = places(r"\bst\.global", ptx)
    assert writes and min(writes) > waits[0], name


def arguments_read(ptx: str, pointers: list[str], until: str) -> Counter[str]:
    """How many loads and bulk copies, up to an instruction, compute their addresses from each argument."""
    entry, body = re.split(r"\)\n", ptx[ptx.index(".entry") :], maxsplit=1)
    declared = re.findall(r"\.param (?=.*(?:\.ptr|\.b8) ).*?(\w+_param_\d+)", entry)
    name_of = dict(zip(declared, pointers, strict=False))  # the last two are the compiler's own
    origins: dict[str, set[str]] = {}
    found: Counter[str] = Counter()
    for line in body[: body.rindex(until)].splitlines():
        operation = re.sub(r"^\s*(@!?%p\d+ )?", "", line)
        target, _, sources = operation.partition(",")
        operands = operation if re.match(r"cp\.async\.bulk\.tensor", operation) else sources or operation
        used = {name_of[it] for it in re.findall(r"\w+_param_\d+", operands) if it in name_of}
        used |= {it for one in re.findall(r"%rd?\d+", operands) for it in origins.get(one, ())}
        if re.match(r"(ld|cp\.async\.bulk\.tensor\S*)\.global", operation):
            found.update(used)
        elif written := re.findall(r"%rd?\d+", target):
            origins[written[0]] = used
    return found


WRITTEN = {"out_ptr", "values_ptr", "indices_ptr", "partial", "x_ptr", "x", "x_tiles", "delta_ptr"}
WRITTEN |= {"new", "hidden_ptr", "hidden_scales_ptr", "hidden_tiles"}  # by the kernel before, or by this
WRITTEN |= {"k_new", "v_new"}
WRITTEN |= {"chosen_ptr", "best_ptr", "y_ptr"}
IN_FLIGHT = {
    "_ring_kernel": "w_desc",
    "_grouped_ring_kernel": "scales_desc",
    "_few_rows_kernel": "weight_ptr",
}
IN_FLIGHT |= {"_ring_attention_kernel": "k_desc", "_verify_attention_kernel": "k_desc"}
IN_FLIGHT |= {"_decode_attention_kernel": "cache"}


@pytest.mark.timeout(2000)  # all kernels are compiled: minutes on a busy machine
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_best_rung_of_each_architecture_compiles_for_it(capability, compiled):
    """Dependent launches from 9.0 on, ordinary ones before."""
    kernels = KERNELS | OF_CAPABILITY.get(capability, set())
    assert {name.removesuffix("_kernel") for name, *_ in compiled} == kernels
    for name, ptx, dependent, shared, pointers in compiled:
        assert f".target sm_{capability}" in ptx
        assert shared <= SHARED_MEMORY[capability], name
        assert dependent == (capability >= 90 and name not in ORDINARY), name
        assert ("griddepcontrol" in ptx) == dependent, name
        if dependent:
            assert_waits_once_then_releases_once_then_writes(name, ptx)
            early, ever = (arguments_read(ptx, pointers, it) for it in ("griddepcontrol.wait", "ret;"))
            assert not WRITTEN & set(early), name
            assert name not in IN_FLIGHT or (early[IN_FLIGHT[name]] > 1 and WRITTEN & set(ever)), name


Chain = Callable[[Kernels], tuple[Tensor, ...]]


def assert_replays_equal_ordinary_launches(chain: Chain, refill: Callable[[int], None]) -> None:
    """``chain``, captured with dependent launches, gives at every replay what ordinary launches give.

    refill(seed) puts fresh inputs into the tensors that the chain reads.
    """
    refill(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(TRITON_DEPENDENT)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain(TRITON_DEPENDENT)
    for seed in range(1, REPLAYS + 1):
        refill(seed)
        graph.replay()
        found = [output.clone() for output in outputs]
        refill(seed)
        for mine, expected in zip(found, chain(TRITON), strict=True):
            if expected.is_floating_point():
                assert_near(mine, expected)
            else:
                assert torch.equal(mine, expected)


def step_of(model, state: DeviceState, caches: Tensor):
    """The step as a chain of kernels: the plan of attention, layers over the paged cache, head, advance."""
    rows, c = len(state.rows), model.config
    variant = variant_for(rows, c.n_kv_heads, 64, 132, c.group, c.head_dim)._replace(pieces=40)
    if ring.runs_on(model.device, model.dtype) and (
        chosen := ring_rows(rows, c.n_kv_heads, 64, 132, c.group, c.head_dim)
    ):
        variant = chosen
    slots = torch.arange(rows, device=model.device)
    layers = {
        kernels: build_layers("fused", "epilogue", "small_m", model, kernels)[0](rows)
        for kernels in (TRITON, TRITON_DEPENDENT)
    }
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}

    def chain(kernels) -> tuple[Tensor, ...]:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            where = {"block_table": state.table, "positions": state.positions, "plan": plan}
            how = {"scale": model.config.scale, "rotary": model.rotary(layer)}
            caches_of_layer = dict(zip(CACHES, caches[:, layer], strict=True))
            return kernels.append_and_attend(q=q, k_new=k, v_new=v, **caches_of_layer, **where, **how)

        plan = kernels.plan_attention(state.positions, variant)
        hidden = layers[kernels](state.tokens, state.positions, attend)
        values, indices = kernels.best_tokens(hidden=hidden, weight=model.lm_head.weight, **drawing)
        kernels.advance(state=state, slots=slots, values=values, indices=indices)
        return hidden, caches.flatten(1), state.rows

    return chain


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16, 64, 200])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_replayed_step_of_dependent_launches_equals_ordinary_ones(family, rows, dtype):
    """Layers, head and advance, from fresh rows and caches each time: a missing wait would show."""
    width = {"d_model": 768, "n_heads": 12, "head_dim": 64, "d_ff": 3072}
    sizes = {"n_layers": 4, "vocab_size": 5000, "n_positions": 64}
    config = small_config(**FAMILIES.get(family, {}) | width | sizes)
    model = random_model(0, config, std=0.02).to("cuda", dtype)
    state = DeviceState(rows, 1, model.device)
    caches = torch.zeros(2, 4, rows, config.n_kv_heads, 64, 64, device="cuda", dtype=dtype)

    def refill(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        state.rows.zero_()
        state.tokens.copy_(torch.randint(5000, (rows,), generator=generator))
        state.positions.copy_(torch.randint(-1, 63, (rows,), generator=generator))
        state.limits.fill_(64)
        state.stops.fill_(-1)
        state.seeds.copy_(torch.randint(2**62, (rows,), generator=generator))
        state.temperatures[::2] = 1.0
        state.table.copy_(torch.arange(rows).view(rows, 1))
        torch.manual_seed(seed)
        caches.normal_()

    assert_replays_equal_ordinary_launches(step_of(model, state, caches), refill)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33])
def test_replayed_dependent_choices_among_some_tokens_equal_ordinary_ones(rows):
    """The norm before, then head, choice and the rows' advance."""
    width, vocab = 768, 50257
    state, slots = DeviceState(rows, 4, torch.device("cuda")), torch.arange(rows, device="cuda")
    x, ones = (torch.ones(shape, device="cuda", dtype=torch.float16) for shape in ((rows, width), (width,)))
    weight = random_logits(vocab, width, "cuda", size=width**-0.5).half()

    def refill(seed: int) -> None:
        x.copy_(random_logits(rows, width, "cuda", seed))
        fresh = make_state(rows, [*RULES, *OTHERS], "cuda", seed)
        state.rows.copy_(fresh.at(slots).rows[:, : state.rows.shape[1]])

    def chain(kernels) -> tuple[Tensor, ...]:
        hidden = kernels.add_norm(x=x, scale=ones, shift=ones, eps=1e-5)
        tiles = kernels.filtered_tiles(hidden=hidden, weight=weight, state=state)
        kernels.choose_filtered(tiles=tiles, state=state)
        kernels.advance(state=state, slots=slots, values=tiles.values, indices=tiles.indices)
        return hidden, state.tokens, state.positions

    assert_replays_equal_ordinary_launches(chain, refill)
