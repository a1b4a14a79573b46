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
    Fault("KV blocks", "kv_blocks.py", "refs[last] == 1", "refs[last] >= 1", ("test_kv_blocks.py",)),
    Fault(
        "prefix cache", "prefix_cache.py", "len(tokens) - 1) //", "len(tokens)) //", ("test_prefix_cache.py",)
    ),
    Fault(
        "block tables",
        "block_tables.py",
        "map(ne, rows, sent)",
        "map(lambda a, b: len(a) != len(b), rows, sent)",
        ("test_block_tables.py",),
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
        "tl.sum(centred * centred, axis=0) / WIDTH",
        ("test_norm.py",),
    ),
    Fault(
        "head kernel", "head.py", "tl.where(columns < N, 0.0", "tl.where(columns <= N, 0.0", ("test_head.py",)
    ),
    Fault(
        "prefill kernel",
        "kernels/prefill_tiles.py",
        "position = starts[sequence] + before",
        "position = before",
        ("test_prefill.py",),
    ),
    Fault(
        "noise",
        "noise.py",
        ".to(tl.float32) + 0.5) * (1",
        ".to(tl.float32) + 0.25) * (1",
        ("test_noise.py", "test_head.py"),
    ),
    Fault("sampler", "sampler.py", "rank >= limit", "rank > limit", ("test_sampling.py",)),
    Fault(
        "host step",
        "host.py",
        "max(contexts))\n",
        "max(contexts) - 1)\n",
        ("test_against_transformers.py", "test_ladder_tokens.py"),
    ),
    Fault(
        "resident step",
        "rows.py",
        "self._left_behind.add(row.index)",
        "self._left_behind.discard(row.index)",
        ("test_resident.py", "test_streaming_load.py", "test_equality_lattice.py"),
    ),
    Fault(
        "packed prefill",
        "prompt_inputs.py",
        "np.cumsum(chunks.counts[:n]) - 1",
        "np.cumsum(chunks.counts[:n]) - chunks.counts[:n]",
        ("test_preemption.py", "test_ladder_tokens.py"),
    ),
    Fault(
        "captured prefill",
        "captured_prefill.py",
        "self._buffer.send_inert(tokens, places)",
        "pass",
        ("test_captured_prefill.py",),
    ),
    Fault("trial", "trial.py", "len(largest) + len(step.captures())", "len(largest)", ("test_trial.py",)),
    Fault(
        "scheduler",
        "engine.py",
        "sequence.n_cached = 0",
        "sequence.n_cached -= 1",
        ("test_preemption.py", "test_scheduler.py"),
    ),
    Fault(
        "admission",
        "admission.py",
        "self._waiting.appendleft(request)",
        "self._waiting.append(request)",
        ("test_scheduler.py", "test_preemption.py"),
    ),
    Fault(
        "streaming", "streaming.py", "stream.put(piece)", "stream.put(piece.strip())", ("test_streaming.py",)
    ),
    Fault("text", "text.py", "held[: min(ends)[1]]", "held[: max(ends)[1]]", ("test_scheduler.py",)),
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
        "return isinstance(value, (int, float)) and not isinstance(value, bool)",
        "return isinstance(value, (int, float))",
        ("test_run_notebooks.py", "test_bad_input.py"),
    ),
)


def found(folder: Path, name: str) -> list[Path]:
    return [path for path in sorted(folder.rglob(Path(name).name)) if path.as_posix().endswith("/" + name)]


def plant(fault: Fault, checkout: Path) -> None:
    files = found(checkout / "rosellm", fault.file)
    holders = [path for path in files if fault.old in path.read_text(encoding="utf-8")]
    if len(holders) != 1:
        sys.exit(
            f"{fault.part}: {fault.old!r} stands in {len(holders)} files called {fault.file}, not in one"
        )
    text = holders[0].read_text(encoding="utf-8")
    holders[0].write_text(text.replace(fault.old, fault.new), encoding="utf-8")


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
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            checkout, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__")
        )
        plant(fault, copy)
        tests = [path.relative_to(copy) for name in fault.tests for path in found(copy / "tests", name)]
        if not tests:
            sys.exit(f"{fault.part}: there is no {' or '.join(fault.tests)}")
        return first_failure(copy, tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("parts", nargs="*", help="parts to try, by a word of their names; all by default")
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not arguments.parts or any(word in fault.part for word in arguments.parts)
    ]
    missed = 0
    for fault in chosen:
        failure = try_one(fault, arguments.checkout.resolve())
        missed += not failure
        print(f"{fault.part:<18}{'found by ' + failure if failure else 'MISSED'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
