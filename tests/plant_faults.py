"""Does the suite find what it is for? ``python -m tests.plant_faults``: a fault in each part, one at a time.

The checkout is copied, one fault is planted in the copy, and the test files of that part run there until one
fails. ``--checkout`` names another one, such as that of an earlier commit; words choose parts.
Not run by ``make test``: it takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """In the file called ``file``, wherever it is, ``old`` becomes ``new``; ``tests`` are names, too."""

    part: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "KV blocks",
        "kv_blocks.py",
        "n_tokens > 0 and self._refs",
        "n_tokens < 0 and self._refs",
        ("test_kv_blocks.py",),
    ),
    Fault(
        "prefix cache", "prefix_cache.py", "len(tokens) - 1) //", "len(tokens)) //", ("test_prefix_cache.py",)
    ),
    Fault(
        "block tables",
        "ladder/rungs.py",
        "map(ne, rows, sent)",
        "map(lambda a, b: len(a) != len(b), rows, sent)",
        ("ladder/test_tables.py",),
    ),
    Fault("staging", "staging.py", ".copy_(source", ".copy_(source.clamp(max=50)", ("test_resident.py",)),
    Fault(
        "device state",
        "device_state.py",
        "sequence.max_length,",
        "sequence.max_length + 1,",
        ("test_device_state.py", "test_resident.py"),
    ),
    Fault(
        "advance kernel",
        "advance.py",
        "(token == stop) | (position + 2 >=",
        "(token == stop) | (position + 1 >=",
        ("test_device_state.py",),
    ),
    Fault(
        "attention kernel",
        "kernels/attention.py",
        "if tile == 0:",
        "if tile >= 0:",
        ("kernels/test_attention.py",),
    ),
    Fault(
        "attention plan",
        "attention_plan.py",
        "first = tl.cdiv((ends - tiles + 1) * filled, total) - 1",
        "first = tl.cdiv((ends - tiles) * filled, total) - 1",
        ("test_attention_plan.py",),
    ),
    Fault(
        "online softmax",
        "online_softmax.py",
        "l_i = tl.sum(l_i, axis=1)",
        "l_i = tl.max(l_i, axis=1)",
        ("kernels/test_attention.py",),
    ),
    Fault(
        "rotary kernel",
        "kernels/rotary.py",
        "(second * cos[None, :] + first * sin[None, :])",
        "(second * cos[None, :] - first * sin[None, :])",
        ("test_rotary.py",),
    ),
    Fault("swiglu", "linear.py", "y = silu(gate) * up", "y = gate * silu(up)", ("test_linear.py",)),
    Fault("linear kernel", "linear.py", "1.5957691216057308", "1.5057691216057308", ("test_linear.py",)),
    Fault(
        "norm kernel",
        "kernels/norm.py",
        "tl.sum(centred * centred, axis=0) / C",
        "tl.sum(centred * centred, axis=0) / x.shape[0]",
        ("test_norm.py",),
    ),
    Fault(
        "head kernel", "head.py", "tl.where(columns < N, 0.0", "tl.where(columns <= N, 0.0", ("test_head.py",)
    ),
    Fault(
        "prefill kernel",
        "kernels/prefill_tiles.py",
        "after - before, start + before",
        "after - before, before",
        ("test_prefill.py", "test_prefill_pieces.py"),
    ),
    Fault(
        "noise",
        "noise.py",
        "(1 / 4294967296) + (0.5 / 4294967296)",
        "(1 / 4294967296) + (0.2 / 4294967296)",
        ("test_noise.py", "test_head.py"),
    ),
    Fault(
        "sampler",
        "kernels/draw.py",
        "rank >= limit",
        "rank > limit",
        ("test_sampling.py", "test_sampling_requests.py"),
    ),
    Fault(
        "host step",
        "dense.py",
        "mask, max(contexts))\n",
        "mask, max(contexts) - 1)\n",
        ("test_against_transformers.py", "test_ladder_tokens.py"),
    ),
    Fault(
        "resident step",
        "planner.py",
        "self._left_behind.add(row.index)",
        "self._left_behind.discard(row.index)",
        ("test_resident.py", "test_streaming_ends.py", "test_equality_lattice.py"),
    ),
    Fault(
        "packed prefill",
        "prompt_inputs.py",
        "np.array(chunks.counts[:n], np.int64).cumsum() - 1",
        "np.array(chunks.counts[:n], np.int64).cumsum() - chunks.counts[:n]",
        ("test_preemption.py", "test_equality_lattice.py"),
    ),
    Fault(
        "captured prefill",
        "captured_prefill.py",
        "self.buffer.send_inert(tokens, places)\n        return",
        "return",
        ("test_captured_prefill.py",),
    ),
    Fault("trial", "trial.py", "len(largest) + len(step.captures())", "len(largest)", ("test_trial.py",)),
    Fault(
        "scheduler",
        "engine.py",
        "sequence.num_cached_tokens = 0",
        "sequence.num_cached_tokens -= 1",
        ("test_preemption.py", "test_scheduler.py"),
    ),
    Fault(
        "admission",
        "admission.py",
        "self.extendleft(request for request in reversed(candidates)",
        "self.extend(request for request in reversed(candidates)",
        ("test_scheduler.py", "test_preemption.py"),
    ),
    Fault(
        "streaming",
        "streaming.py",
        "stream.inbox.put((stream.request_id, piece))",
        "stream.inbox.put((stream.request_id, piece.strip()))",
        ("test_streaming.py", "test_streaming_ends.py"),
    ),
    Fault("text", "text.py", "held[: min(ends)[1]]", "held[: max(ends)[1]]", ("test_text.py",)),
    Fault(
        "weights",
        "weights.py",
        "not extremes.isfinite().all()",
        "extremes.isnan().any()",
        ("test_weights.py",),
    ),
    Fault("tokenizer", "tokenizer.py", "raw.no_truncation()", "raw.no_padding()", ("test_tokenizer.py",)),
    Fault(
        "records",
        "record.py",
        "float(np.median(column))",
        "float(np.mean(column))",
        ("bench/test_record.py",),
    ),
    Fault(
        "batch runner",
        "run_notebooks.py",
        "default is None or type(value) in",
        "default is None or isinstance(value, bool) or type(value) in",
        ("test_run_notebooks.py", "test_bad_input.py"),
    ),
    Fault("verdicts", "verdicts.py", "<= 2 * self.spread", "<= self.spread", ("test_verdicts.py",)),
    Fault(
        "floors",
        "lab/records/records.py",
        "max_batch_size * one.mean",
        "max_batch_size + one.mean",
        ("test_records.py",),
    ),
    Fault(
        "timeline",
        "timeline.py",
        "np.array([one.busy for",
        "np.array([one.end - one.start for",
        ("test_timeline.py",),
    ),
    Fault("busy chart", "busy.py", "x=values, y=labels", "x=values[::-1], y=labels", ("test_busy.py",)),
    Fault("pages", "page.html.j2", '<details class="code">', '<div class="code">', ("test_gallery.py",)),
    Fault("checker", "check_kernel.py", "exact)).any():", "exact)).all():", ("test_check_kernel.py",)),
    Fault(
        "long cases", "makers.py", "lengths[0] = case.cached", "lengths[0] = 72", ("test_wrong_kernels.py",)
    ),
    Fault("diagnose", "rules.py", "1 / (1 - min(share", "1 / (1 + min(share", ("test_rules.py",)),
    Fault("fleet", "scale/plan.py", "/ (ends[n - fleet.most - 1]", "/ (ends[n - 1]", ("test_plan.py",)),
    Fault("llama", "families/llama.py", 'Norm("rms", 1e-6)', 'Norm("rms", 1e-5)', ("test_families.py",)),
    Fault("rope", "models/rope.py", "dim=1) * amplitude", "dim=1)", ("test_families.py",)),
    Fault(
        "parts of a model",
        "models/part.py",
        "n_rows // whole.d_ff",
        "1",
        ("test_part.py", "test_tensor_parallel.py"),
    ),
    Fault("router", "router.py", "-known[replica], self", "known[replica], self", ("test_router.py",)),
    Fault(
        "recipe",
        "roseinfer/recipe.py",
        "rule.value and broken",
        "rule.value and not broken",
        ("test_recipe.py",),
    ),
    Fault(
        "parameters",
        "roseinfer/sampling.py",
        "self.seed + i",
        "self.seed",
        ("test_sampling.py", "test_llm.py"),
    ),
    Fault("request", "roseinfer/request.py", "/ (n - 1) if n > 1", "/ n if n > 1", ("test_scheduler.py",)),
    Fault(
        "log-probabilities",
        "layers/logprobs.py",
        "1 + (logprobs > own)",
        "(logprobs > own)",
        ("test_logprobs.py",),
    ),
    Fault("trainer", "training.py", "0.55 + 0.45 * math.cos", "0.45 + 0.55 * math.cos", ("test_train.py",)),
    Fault(
        "ranks",
        "watch.py",
        "0 if moved else self._still[rank] + 1",
        "self._still[rank] + 1",
        ("test_ranks_end.py",),
    ),
    Fault(
        "warm-up",
        "step.py",
        "step.rehearsals(n_tokens) if rows is None",
        "step.rehearsals(n_tokens) if rows is not None",
        ("test_warm_ups.py",),
    ),
    Fault(
        "warm-up of rows",
        "worker.py",
        "return steps\n        return self.prompts.captures()",
        "pass\n        return self.prompts.captures()",
        ("test_warm_ups.py",),
    ),
    Fault(
        "largest captures",
        "worker.py",
        "self.logprobs.captures()[:1]",
        "self.logprobs.captures()[:2]",
        ("test_trial.py",),
    ),
    Fault(
        "largest prefill",
        "worker.py",
        "self.prompts.captures()[:1]",
        "self.prompts.captures()[:2]",
        ("test_trial.py",),
    ),
    Fault("rows sent", "worker.py", "words.shape[1] - 1]", "words.shape[1] + 0]", ("test_resident.py",)),
    Fault(
        "tied head", "models/model.py", "shared if whole else", "shared if not whole else", ("test_model.py",)
    ),
    Fault("chat", "models/chat.py", "prompt=add_generation_prompt", "prompt=True", ("test_chat.py",)),
)


ROOMS = {  # each has a fault in it
    *(f"lab/{room}" for room in ("diagnose", "figures", "records", "running", "scale", "trying")),
    *("models", "models/families", "rosetrainer", "assets/pages"),
    *("roseinfer", *(f"roseinfer/{room}" for room in ("cache", "kernels", "layers", "ranks", "serving"))),
    *("roseinfer/steps", "bench", "cluster", "ladder"),
}


def found(folder: Path, name: str) -> list[Path]:
    return [path for path in sorted(folder.rglob(Path(name).name)) if path.as_posix().endswith("/" + name)]


def holders(fault: Fault, checkout: Path) -> list[Path]:
    """The files called ``fault.file`` that have the text to be changed: one, or the fault is stale."""
    return [path for path in found(checkout / "rosellm", fault.file) if fault.old in path.read_text("utf-8")]


def plant(fault: Fault, checkout: Path) -> None:
    (path,) = holders(fault, checkout)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def first_failure(checkout: Path, tests: list[Path]) -> str:
    """The test that failed; "" if none did."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *map(str, tests)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    told = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return told[1] if told else f"pytest ended with {done.returncode}: {done.stderr.strip()[-200:]}"


def try_one(fault: Fault, checkout: Path) -> str:
    """What became of the fault: found by a test, missed, or stale."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__")
        shutil.copytree(checkout, copy, ignore=ignored)
        tests = [path.relative_to(copy) for name in fault.tests for path in found(copy / "tests", name)]
        if len(holders(fault, copy)) != 1 or len(tests) < len(fault.tests):
            return "STALE"
        plant(fault, copy)
        failure = first_failure(copy, tests)
        return f"found by {failure}" if failure else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--workers", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("parts", nargs="*", help="parts to try, by a word of their names; all by default")
    arguments = parser.parse_args()
    words = arguments.parts
    chosen = [fault for fault in FAULTS if not words or any(word in fault.part for word in words)]
    with ThreadPoolExecutor(arguments.workers) as threads:
        tried = threads.map(lambda fault: try_one(fault, arguments.checkout.resolve()), chosen)
        results = []
        for fault, result in zip(chosen, tried, strict=True):
            results.append(result)
            print(f"{fault.part:<18}{result}", flush=True)
    n_found = sum(result.startswith("found") for result in results)
    print(f"{n_found} of {len(chosen)} faults found")
    return 0 if n_found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
