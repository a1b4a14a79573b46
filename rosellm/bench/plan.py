"""The plan of a campaign: blocks of runs, each a command with the records that it makes.

Seconds are those of an H200 on which no kernel has been compiled yet, estimated from earlier records.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rosellm.roseinfer.recipe import LADDER


class Run(NamedTuple):
    """A command, and the records that it makes.

    command: arguments of ``python -m``. ``{folder}`` is that of complete records, ``{record}`` the record's
        file. A command without ``{record}`` takes names of records, and prints each that is complete.
    records: path below the folder, without suffix → seconds.
    start_s: seconds of the process before the first record.
    """

    command: str
    records: Mapping[str, float]
    start_s: float = 0.0

    def arguments(self, folder: Path, output: Path, wanted: list[str]) -> list[str]:
        """Return the command's arguments for some of its records, which it writes to ``output``."""
        record = output / f"{wanted[0]}.json"
        words = [word.format(folder=folder, record=record) for word in shlex.split(self.command)]
        if "{record}" in self.command:
            return words
        return [*words, *(Path(name).name for name in wanted), "--output", str(output)]

    def expected_s(self, wanted: list[str]) -> float:
        """Return how many seconds these records take."""
        return self.start_s + sum(self.records[record] for record in wanted) if wanted else 0.0

    def within(self, seconds: float, wanted: list[str]) -> list[str]:
        """Return as many of the records, from the first on, as can be made in ``seconds``."""
        n = sum(self.expected_s(wanted[: i + 1]) <= seconds for i in range(len(wanted)))
        return wanted[:n]


class Block(NamedTuple):
    """Runs whose records are compared, so that one lease makes all of them."""

    name: str
    runs: list[Run]

    @property
    def seconds(self) -> float:
        return sum(one.expected_s(list(one.records)) for one in self.runs)


# The rungs compared in whole runs; W6 and W7, whose prompts are long, only where a page compares them.
RUNGS = [rung for rung in LADDER if rung not in ("one_pass", "speculative")]
OF_LONG_PROMPTS = ["resident_step", "packed_prefill", "split_kv"]
QWEN, LLAMA_1B, LLAMA_8B = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
LOADED_S = {"gpt2": 7.0, QWEN: 8.0, LLAMA_1B: 10.0, LLAMA_8B: 22.0}  # of a process, until the model is loaded


def _runs(seconds: Mapping[str, float], rungs: list[str]) -> dict[str, float]:
    return {f"{workload}-{rung}": each for workload, each in seconds.items() for rung in rungs}


def _of(model: str, seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{Path(model).name}/{name}": each for name, each in seconds.items()}


def _measured(model: str, records: Mapping[str, float], options: str = "") -> Run:
    return Run(f"rosellm.lab.measure --model {model} {options}", records, LOADED_S[model])


def _bench(name: str, model: str, options: str, record: str, seconds: float) -> Run:
    return Run(f"rosellm.bench {name} --model {model} {options} --json {{record}}", {record: seconds})


def _dummy(name: str, model: str, options: str, record: str, seconds: float) -> Run:
    path = f"{Path(model).name}/{record}"
    return _bench(name, model, f"--load-format dummy {options}", path, seconds)


_STEPS = {"ceilings": 3.0, "steps-W0": 55.0, "steps-W1": 55.0, "steps-W2": 75.0, "steps-W3": 105.0}
_WHOLE = {"W0": 3.6, "W1": 3.9, "W2": 5.2, "W3": 2.7, "W4": 4.0, "W5": 9.0}
LADDER_RUNS = [
    _measured("gpt2", _STEPS | _runs(_WHOLE, RUNGS) | _runs({"W6": 5.1, "W7": 2.0}, OF_LONG_PROMPTS))
]

_TRACED = {"counts": 90.0, "ledger": 160.0, "timelines": 20.0, "ledger_w8": 12.0, "equality": 55.0}
_PARTS = {"kv_append": 3.0, "bookkeeping": 2.0, "autotune": 12.0, "grid": 25.0}
_PARTS |= {f"ablations-W{i}": 22.0 for i in range(4)} | {f"leave_one_out-W{i}": 30.0 for i in (1, 2, 3)}
_PARTS |= {f"lengths-{batch}": 18.0 for batch in (8, 64, 128, 256)}
STEP_RUNS = [_measured("gpt2", _TRACED | _PARTS)]

_SERVED = {"kv_pressure": 23.0, "determinism": 75.0, "first_request": 75.0}
_SERVED |= {"gpt2/sampling_steps": 28.0}
_BY_QWEN = {"chunk_budget": 230.0, "sampling_steps": 30.0}
SERVING_RUNS = [
    _measured(QWEN, _of(QWEN, _BY_QWEN) | {"prefix_cache": 45.0}),
    _measured("gpt2", _runs({"W8": 9.0, "W9": 9.0, "W10": 9.0}, ["split_kv"]) | _SERVED),
]

_WHOLE = {"D1": 4.0, "D8": 4.0, "D64": 6.0, "P512": 7.0, "MIX": 18.0, "L8K": 8.0, "L32K": 6.0, "PRE": 6.0}
_WHOLE |= {"TTFT64": 3.0, "TTFT1K": 3.0, "ledgers": 12.0, "prompt_attention": 16.0}
_SLOWER = {"D1": 10.0, "D8": 8.0, "D64": 12.0, "P512": 18.0, "MIX": 46.0, "L8K": 22.0, "L32K": 12.0}
_SLOWER |= {"PRE": 24.0, "ledgers": 29.0}
MODEL_RUNS = {
    QWEN: _of(QWEN, _WHOLE | {"steps-D1": 36.0, "steps-D64": 36.0, "plain_loops": 200.0}),
    LLAMA_1B: _of(LLAMA_1B, _WHOLE) | {"llama_1b_protocol": 16.0},
    LLAMA_8B: _of(LLAMA_8B, _WHOLE | _SLOWER),
}

_ALL = "--formats none fp8 int8 int4 --turns 1"
_BY_ROWS = f"{_ALL} --rows 1,2,4,8,16,32,64,128,256 --prompt-tokens 1 --new-tokens 64"
_HEADS = "--formats none kv-fp8 fp8+kv-fp8 --turns 1 --workloads L8K L32K MIX"
FORMAT_RUNS = [
    _dummy("formats", model, options, record, seconds)
    for model, options, record, seconds in (
        (QWEN, f"{_ALL} --workloads D1 D8 D64 PRE", "formats", 36.0),
        (QWEN, _BY_ROWS, "formats_steps", 23.0),
        (LLAMA_1B, f"{_ALL} --workloads D1 D8 D64 PRE", "formats", 40.0),
        (LLAMA_1B, _BY_ROWS, "formats_steps", 22.0),
        (LLAMA_8B, f"{_ALL} --workloads D1 D8 D64 PRE", "formats", 82.0),
        (LLAMA_8B, _BY_ROWS, "formats_steps", 40.0),
        (LLAMA_8B, _HEADS, "formats_kv", 148.0),
    )
]

_RANDOM = "--dtype bfloat16 --texts random --rows 1,4,16,64,128,256 --new-tokens 256"
_VERIFY = "--prompt-tokens 64,2000 --turns 2 --traces {folder}/drafts-rose-tiny.json"
_OTHERS = {"gpt2": 14.0, "gpt2-medium": 19.0, "gpt2-xl": 29.0, "microsoft/Phi-3-mini-4k-instruct": 19.0}
_OTHERS |= {"Qwen/Qwen2.5-0.5B-Instruct": 15.0, "Qwen/Qwen2.5-1.5B-Instruct": 18.0, "Qwen/Qwen3-1.7B": 15.0}
_OTHERS |= {"Qwen/Qwen3-4B": 20.0, "meta-llama/Llama-3.2-3B": 19.0, "mistralai/Mistral-7B-v0.1": 17.0}
DRAFT_RUNS = [
    *(
        _bench("drafts", name, "--new-tokens 256 --turns 9", f"drafts-{name}", 45.0)
        for name in ("rose-tiny", "rose-tiny-qwen3")
    ),
    _dummy("drafts", QWEN, _RANDOM, "drafts", 40.0),
    _dummy("verify", QWEN, _VERIFY, "verify_drafts", 85.0),
    _dummy("verify", LLAMA_1B, _VERIFY, "verify_drafts", 66.0),
    _dummy("verify", LLAMA_8B, f"{_VERIFY} --rows 1,8", "verify_drafts", 73.0),
    *(
        _dummy("steps", model, "--turns 2", "steps_by_rows", seconds)
        for model, seconds in (_OTHERS | {QWEN: 12.0, LLAMA_1B: 14.0, LLAMA_8B: 20.0}).items()
    ),
]

PLAN = [
    Block("ladder", LADDER_RUNS),
    Block("steps", STEP_RUNS),
    Block("serving", SERVING_RUNS),
    *(Block(Path(model).name, [_measured(model, records)]) for model, records in MODEL_RUNS.items()),
    Block("formats", FORMAT_RUNS),
    Block("drafts", DRAFT_RUNS),
]
