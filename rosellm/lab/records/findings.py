"""Each notebook's finding in one line, computed from the records of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median

from rosellm.lab.records import arrivals, first_request, one_pass, two_gpus
from rosellm.lab.records.cuts import MODELS
from rosellm.lab.records.model_ladder import rest_a_layer
from rosellm.lab.records.model_runs import RIVAL, recorded_models, short_name, table
from rosellm.lab.records.records import (
    RecordError,
    Results,
    floor_tok_s,
    number,
    percent_change,
    results_folder,
    rivals,
)
from rosellm.lab.records.sampling_steps import GREEDY, recorded_modes
from rosellm.lab.records.verdicts import verdicts
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG

LONGER_NAMES = {"paged": "paged_attention", "no_mask": "mask_removal"}
LONGER_NAMES |= dict.fromkeys(("full_batch", "identity_pos"), "slot_mapping")
LONGER_NAMES |= dict.fromkeys(("fused_norm", "fused_gelu"), "fused_elementwise")
UNTOLD = "–"
TRANSFORMERS = "transformers 5.17 generate"  # among the rivals


def notebooks_of(rungs: Iterable[str], folder: Path) -> dict[str, str]:
    """Rung → the notebook of ``folder`` called after it, ``NN_RUNG``; rungs without one are left out.

    Two rungs may share a notebook, which bears the number of the first.
    """
    there = {path.stem.partition("_")[2]: path.stem for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    names = {rung: LONGER_NAMES.get(rung, rung) for rung in rungs}
    return {rung: there[name] for rung, name in names.items() if name in there}


def _committed() -> dict[str, str]:
    try:
        return notebooks_of(BEFORE, results_folder().parent)
    except RecordError:  # the package without its notebooks
        return {}


NOTEBOOKS = _committed()
RUNGS_OF = {name: [rung for rung in NOTEBOOKS if NOTEBOOKS[rung] == name] for name in NOTEBOOKS.values()}


def finding(results: Results, notebook: str) -> str:
    """One line of plain text with ``code`` marks; "–" for a notebook of no rung, or without records."""
    if notebook in OTHERS:
        with suppress(RecordError):
            return OTHERS[notebook](results)
    rungs = RUNGS_OF.get(notebook, [])
    gains = {rung: _gains(results, rung) for rung in rungs}
    if set(gains.values()) <= {UNTOLD}:
        return UNTOLD
    return (
        "; ".join(f"`{rung}`: {told}" for rung, told in gains.items()) if len(gains) > 1 else gains[rungs[0]]
    )


def _gains(results: Results, rung: str) -> str:
    """The three largest changes that count."""
    rows = [row for row in verdicts(results, BEFORE[rung], rung) if row.is_comparable]
    largest_first = sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
    told = [f"{row.workload} {row.change}" for row in largest_first if row.sign][:3]
    if told:
        return f"tok/s {', '.join(told)}"
    return "no difference beyond the noise" if rows else UNTOLD


def _span(results: Results) -> str:
    first, best = (number(results.value("W3", rung)) for rung in ("dense", BEST_RUNG))
    return f"W3: {first} → {best} tok/s up the ladder"


def _split(results: Results) -> str:
    steps = results.load("grid")["figures"]["few"]
    pairs = zip(steps["dependent_launch"], steps["split_kv"], strict=True)
    gain, row = max((1 - new["step_us"] / old["step_us"], new["batch"]) for old, new in pairs)
    rows = "1 row" if row == 1 else f"{row} rows"
    less = f"{number(gain * 100)} % less"
    return f"no workload reached its recorded threshold; above it a step of {rows} takes up to {less}"


def _invariance(results: Results) -> str:
    cost = results.load("determinism")["figures"]["cost"]
    lost = ", ".join(f"{w} −{number(cost[w]['cost'] * 100)} %" for w in ("W0", "W1", "W2", "W3"))
    return f"bitwise batch-invariant, at a cost: {lost}"


def _pressure(results: Results) -> str:
    figures = results.load("kv_pressure")["figures"]
    kept = ", ".join(f"{workload} {number(one['ratio'] * 100)} %" for workload, one in figures.items())
    return f"throughput left with a quarter of the KV blocks: {kept}"


def _append(results: Results) -> str:
    rows = [row for row in results.load("kv_append")["rows"] if row["batch_size"] == 256]
    timed = [row for row in rows if "device_rotating" in row["medians_s"]]
    if not timed:
        raise RecordError(f"kv_append of {results.folder.name} has no GPU time of 256 tokens")
    best = min(timed, key=lambda row: row["medians_s"]["device_rotating"])
    least, floor = best["medians_s"]["device_rotating"] * 1e6, best["floor_s"] * 1e6
    return (
        f"256 tokens: `{best['variant']}` takes {number(least)} µs of GPU time, its bytes {number(floor)} µs"
    )


def _modern(results: Results) -> str:
    before, after = (results.load(name)["validation"]["perplexity"] for name in ("train", "train-qwen3"))
    return f"`rose-tiny` → `rose-tiny-qwen3`: perplexity {number(before)} → {number(after)}"


def _long(results: Results) -> str:
    shares = {}
    for model in recorded_models(results):
        row = next((row for row in table(results, model) if row.workload == "L32K"), None)
        if row and row.ours and row.floor:
            shares[model] = f"{model} {number(row.ours / row.floor * 100)} %"
    if not shares:
        raise RecordError(f"{results.folder.name} has no L32K of a modern model")
    return f"L32K, of its floor: {', '.join(shares.values())}"


def _layers(results: Results) -> str:
    shapes = {short_name(name): arch for name, arch in KNOWN_SHAPES.items()}
    rests = [rest_a_layer(results, name, shapes[name], "D1") for name in recorded_models(results)]
    if not rests:
        raise RecordError(f"{results.folder.name} has no D1 of a modern model")
    ours, theirs = (f"{min(us):.0f} to {max(us):.0f}" for us in zip(*rests, strict=True))
    return f"D1, above the floor: {ours} µs a layer, whichever the model; vLLM {theirs}"


def _mixed(results: Results) -> str:
    values = results.values("W8")
    if not values:
        raise RecordError(f"{results.folder.name} has no W8")
    best, theirs = max(values.values()), rivals("W8")[RIVAL]["W8"]
    share = best / floor_tok_s(results, "W8") * 100
    times, percent = f"{number(best / theirs)} times vLLM's", f"{number(share)} % of the floor"
    return f"W8: {number(best)} tok/s, {times}, {percent}"


def _climbed(results: Results) -> str:
    theirs = rivals("W2")[TRANSFORMERS]["W2"]
    ours = ", ".join(f"`{rung}` {number(results.value('W2', rung))}" for rung in ("dense", BEST_RUNG))
    return f"W2, tok/s: transformers {number(theirs)}, {ours}"


def _filters(results: Results) -> str:
    told = []
    for model, batches in recorded_modes(results).items():
        us = {mode: median(turns) for mode, turns in batches[max(batches)].items()}
        counted, by_sorting = (
            percent_change(us[GREEDY], us[mode]) for mode in ("top-k, top-p", "top-k, top-p, sorted")
        )
        told.append(f"{model}, {max(batches)} rows: {counted} a step, sorted {by_sorting}")
    if not told:
        raise RecordError(f"{results.folder.name} has no step times of sampling")
    return f"top-k and top-p, {'; '.join(told)}"


def _first(results: Results) -> str:
    if not (processes := first_request.recorded(results)):
        raise RecordError(f"{results.folder.name} has no first request")
    found = {one.told: one.found for one in first_request.verdicts(processes)}
    empty, filled = (found[f"construction, {cache} cache"] for cache in first_request.AIMS_S)
    share = min(value for told, value in found.items() if told.startswith("first run"))
    built = f"an engine is built in {number(empty)} s, with compiled kernels in {number(filled)} s"
    return f"{built}; first W8 run: {number(share)} % of the third's tok/s"


def _rates(results: Results) -> str:
    if not (figures := arrivals.recorded(results)):
        raise RecordError(f"{results.folder.name} has no arrivals")
    ms = [f"{number(run['ttft_p99_s'] * 1e3)} ms at {run['share']:.0%}" for run in figures["runs"]]
    return f"TTFT p99 {', '.join(ms)} of {number(figures['capacity_req_s'])} requests a second"


def _one_pass(results: Results) -> str:
    told = []
    for model, figures in one_pass.recorded(results).items():
        found = one_pass.verdict_of(figures)
        fewer = [sum(figures["runs"][way]["passes"].values()) for way in (one_pass.APART, one_pass.JOINED)]
        told.append(
            f"{model}, {found.workload}: {found.change} tok/s, {found.word}, passes {fewer[0]} → {fewer[1]}"
        )
    if not told:
        raise RecordError(f"{results.folder.name} has no record of one pass")
    return "; ".join(told)


def _shared(results: Results) -> str:
    return _on_two(results, "tensor_parallel")


def _replicas(results: Results) -> str:
    return _on_two(results, "replicas")


def _on_two(results: Results, kind: str) -> str:
    """By model and workload, two GPUs' tokens per second over one's; of several ways to sum the fastest."""
    told = []
    for model in MODELS:
        for workload, sides in two_gpus.recorded(results, model).get("figures", {}).get(kind, {}).items():
            rates = {side: one["medians"]["total_throughput_tok_s"] for side, one in sides.items()}
            alone = rates.pop("1")
            told.append(f"{model} {workload} {number(max(rates.values()) / alone)} ×")
    if not told:
        raise RecordError(f"two {results.folder.name} have no whole runs")
    return f"two GPUs against one, tok/s: {', '.join(told)}"


OTHERS: dict[str, Callable[[Results], str]] = {
    "00_map": _span,
    "21_split_kv": _split,
    "23_determinism": _invariance,
    "24_faults": _pressure,
    "25_your_kernel": _append,
    "26_modern_model": _modern,
    "27_long_contexts": _long,
    "28_modern_ladder": _layers,
    "29_why_is_it_slow": _climbed,
    "30_mixed_lengths": _mixed,
    "31_sampling": _filters,
    "32_first_request": _first,
    "33_arrivals": _rates,
    "34_one_pass": _one_pass,
    "35_tensor_parallelism": _shared,
    "36_replicas": _replicas,
}
