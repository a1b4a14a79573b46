"""README's and docs' figures are those of the records: each is read out of the table or sentence itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import chain
from statistics import median

import pytest

from rosellm.bench import drafts
from rosellm.lab.records import records
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import _rivals_file, find
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.steps.speculative import MOST_VERIFIED
from tests.claims.reading import ROOT, falsified, number, rows, said, wrong

busy, formats = load_exhibit("busy"), load_exhibit("formats")

H200, H100, CPU = find(), find("nvidia-h100-80gb-hbm3"), find("cpu")
RIVALS = _rivals_file()
LEASE = RIVALS["one_lease_2026_11_26"]
ATTENTION = {model: record["figures"] for model, record in H200.by_model("prompt_attention").items()}
READ_TB_S = max(H200.figures("ceilings", "read_TB_s"))
STREAMS = [one.load("llama_1b_protocol")["figures"]["medians"] for one in (H200, H100)]
MODELS = {
    "GPT-2 small": "gpt2",
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen2.5-1.5B (not tuned for then)": "qwen2.5-1.5b",
    "Llama-3.2-1B": "llama-1b",
    "Llama-3.1-8B": "llama-8b",
}
WORKLOADS = {
    "1 request of 512 tokens": "W0",
    "512 requests, prompts and outputs of 16 to 512": "W8",
    "1 request of 512": "D1",
    "256 requests, prompts and outputs of 100 to 1,024": "MIX",
    "first token of a prompt of 1,024, ms": "TTFT1K",
    "16 requests of 256 after prompts of 200": "16x256 p200",
    "16 requests of 256 after prompts of 8,192": "L8K",
    "64 prompts of 2,048, prompt tokens per second": "PRE",
}
RECORDED = {
    "GPT-2 small": "gpt2",
    "GPT-2 medium": "gpt2-medium",
    "GPT-2 XL": "gpt2-xl",
    "Qwen2.5-0.5B": "Qwen2.5-0.5B-Instruct",
    "Qwen2.5-1.5B": "Qwen2.5-1.5B-Instruct",
    "Phi-3-mini": "Phi-3-mini-4k-instruct",
}
TRIALS = {
    "ring_trials": (
        "half the shared memory",
        "K in any number of ranges",
        "five kernels a layer",
        "8 gate rows beside 8 up rows",
        "q, k and v by the ring, K whole",
        "q, k and v in twice as many ranges",
        "q, k and v in ranges of K",
    ),
    "attention_trials": (
        "the last program combines the pieces",
        "each row in two pieces, which the last program combines",
        "tiles of 64 tokens in four warps",
    ),
    "flight_trials": (
        "keys and values in flight",
        "keys and values in flight: many sequences",
        "keys and values in flight: one sequence",
        "128 weight rows per program",
        "128 weight rows in fewer programs",
        "q, k and v of Llama-3.1-8B in two ranges",
        "norms at the end of the GEMM before them",
    ),
}
Claims = list[tuple[float, str]]


def results_table(text: str) -> Claims:
    """Both engines' figures of one lease, and their ratio: above 1 where ours is better."""
    claims: Claims = []
    for model, workload, *cells in rows(text, "results"):
        together = "W2" if model == "GPT-2 small" else "D64"
        name = WORKLOADS.get(workload) or {"64 requests of 512, all together": together}[workload]
        figures = LEASE["figures"][MODELS[model]][name]
        theirs, ours = figures["vLLM 0.26.0"], figures["rosellm ab671af"]
        ratio = theirs / ours if figures["unit"] == "ms" else ours / theirs
        claims += zip((theirs, ours, ratio), cells, strict=True)
    return claims


def single_streams(text: str) -> Claims:
    """The published figures and ours of the same protocol on the same GPU model."""
    (published,) = RIVALS["modern_models"]["published"].values()
    megakernel = published["HazyResearch megakernel, us a token"]
    graph = published["CUDA graph with programmatic dependent launch, us a token"]
    ours = LEASE["llama_1b_protocol"]
    found = re.findall(
        r"([\d.]+) µs\*{0,2} per (?:token here|decode step here)"
        r"|([\d.]+) µs(?:\s+for the megakernel| and a CUDA)"
        r"|([\d.]+) µs(?:\s+for a CUDA| on the same)|and ([\d.]+) µs per\s+token of the whole call",
        text,
    )
    values = (ours["decode only"], megakernel, graph, ours["rosellm ab671af, LLM.generate, whole call / 128"])
    claims = [(values[i], group) for groups in found for i, group in enumerate(groups) if group]
    assert {value for value, _ in claims} >= {ours["decode only"], megakernel, graph}
    return claims


def recorded_streams(text: str) -> Claims:
    """The records of the protocol's command on an H200 and an H100."""
    told = re.findall(r"([\d.]+) µs per decode step and ([\d.]+) µs per token\s+\(\[record", text)
    pairs = zip(STREAMS, told, strict=True)
    return [
        claim for one, said in pairs for claim in zip((one["decode_us"], one["call_us"]), said, strict=True)
    ]


def floor_speed(text: str) -> Claims:
    """The one ceiling that all floors rest on."""
    found = re.search(r"at ([\d.]+) TB/s", text)
    assert found
    return [(READ_TB_S, found[1])]


@cache
def ledgers(model: str) -> dict[tuple[int, int], Ledger]:
    """The best rung's, by batch and context."""
    if model == "GPT-2 small":
        found = [Ledger.from_dict(one[BEST_RUNG]) for one in H200.figures("ledger").values()]
    else:
        found = list(load_exhibit("model_ladder").recorded_ledgers(H200, model).values())
    return {(one.batch, round(one.context)): one for one in found}


def steps_table(text: str) -> Claims:
    """Recorded ledgers of the best rung: the step, its floor, and what lies above the floor."""
    claims: Claims = []
    for model, size, *cells in rows(text, "steps"):
        batch, context = (int(number(one)) for one in size.split("×"))
        ledger = ledgers(model)[batch, context]
        roles = load_exhibit("roles_chart").by_role(ledger)
        above = [roles[name].us - (roles[name].floor_us or 0) for name in ("GEMM", "attention", "norm")]
        floor = ledger.floor_us or 0.0
        claims += zip([ledger.step_us, floor, 100 * floor / ledger.step_us, *above], cells, strict=True)
    return claims


def heads(text: str) -> Claims:
    """How much longer the slowest head of few sequences takes than reading its weights, in per cent."""
    found = re.search(r"The head\*\* of the modern models takes at most (\d+)% longer", text)
    assert found
    longer = []
    for model, size, *_ in rows(text, "steps"):
        batch, context = (int(number(one)) for one in size.split("×"))
        if batch <= 16 and model != "GPT-2 small":
            head = load_exhibit("roles_chart").by_role(ledgers(model)[batch, context])["head"]
            longer.append(100 * (head.us / head.floor_us - 1))
    return [(max(longer), found[1])]


def rows_table(text: str) -> Claims:
    """A step of several sequences, as a multiple of a step of one, and how fast it reads."""
    claims: Claims = []
    records = H200.by_model("steps_by_rows")
    assert {one["environment"]["device_name"] for one in records.values()} == {"NVIDIA H200"}
    for model, _, *cells in rows(text, "rows"):
        figures = records[RECORDED.get(model, model)]["figures"]
        us = {int(n): one["median_us"] for n, one in figures.items()}
        assert us == {int(n): median(one["turns_us"]) for n, one in figures.items()}
        multiples = [us[n] / us[1] for n in us if n > 1]
        claims += zip(
            [us[1], *multiples, *(figures[n]["read_TB_s"] for n in ("1", "16", "64"))], cells, strict=True
        )
    return claims


def tuned_table(text: str) -> Claims:
    """Steps of models by rules, at most 10% longer than after tuning."""
    claims: Claims = []
    models = H200.load("tuned_others")["models"]
    shown = iter(rows(text, "tuned"))
    for name, by_rules, after in zip(models, shown, shown, strict=True):
        assert by_rules[0] == name
        turns = models[name]["steps"].values()
        us = {when: [median(one[when]) for one in turns] for when in ("before", "after")}
        longer = [before / tuned for before, tuned in zip(*us.values(), strict=True)]
        assert 1.07 < longer[0] < 1.10 and max(longer[1:]) < 1.02
        claims += zip([*us["before"], *us["after"]], [*by_rules[2:], *after[2:]], strict=True)
    return claims


def whole_runs(text: str) -> Claims:
    """New tokens per second; of prompts alone, prompt tokens per second."""
    claims: Claims = []
    figures = H200.figures("whole_runs")
    runs = [(model, one) for model, each in figures.items() for one in each.values()]
    for (model, run), (name, size, speed) in zip(runs, rows(text, "whole"), strict=True):
        n, new, prompt = (run[key] for key in ("requests", "new_tokens", "prompt_tokens"))
        assert (RECORDED.get(name, name), size) == (model, f"{n} × {new} after {prompt:,}")
        claims.append((n * (prompt if new == 1 else new) / median(run["seconds"]), speed))
    short, long = list(figures["Llama-3.1-8B"].values())[-2:]
    prefill_s = 16 * 8192 / (64 * 2048 / median(short["seconds"]))
    assert prefill_s / median(long["seconds"]) > 0.5 and "take more than half of their run" in text
    return claims


def since_table(text: str) -> Claims:
    """Whole runs before and now, in tokens per second, their ratio, and the share of prefills."""
    claims: Claims = []
    figures = H200.figures("workloads_since")
    runs = [(model, name, run) for model, each in figures.items() for name, run in each.items()]
    for (model, name, run), (said_model, said_name, *cells) in zip(runs, rows(text, "since"), strict=True):
        assert (RECORDED.get(said_model, said_model), said_name) == (model, name)
        spent = {key: median(chain(*run[key]["seconds"])) for key in ("before", "now")}
        n, prefills = run["completion_tokens"], median(chain(*run["now"]["prefill_seconds"]))
        found = n / spent["before"], n / spent["now"], spent["before"] / spent["now"]
        claims += zip((*found, 100 * prefills / spent["now"]), cells, strict=True)
    return claims


def verify_table(text: str) -> Claims:
    """Steps with drafts against plain ones of the same turns; two lengths of prompts in a cell."""
    claims: Claims = []
    records = H200.by_model("verify_drafts")
    assert {one["environment"]["device_name"] for one in records.values()} == {"NVIDIA H200"}
    assert "prompts of 64 / 2,000 tokens" in text
    for model, n, plain, *cells in rows(text, "verify"):
        pair = []
        for tokens in (64, 2000):
            size = f"{n} × {tokens}"
            ways = records[model]["figures"][size]
            us = {k: median(one["verify"]) / median(one["plain"]) for k, one in ways.items()}
            pair.append({"plain": median(chain(*(one["plain"] for one in ways.values())))} | us)
        said = dict(zip(("plain", "1", "3", "7", "15"), (plain, *cells), strict=True))
        assert {k for k, cell in said.items() if cell != "–"} == set(pair[0])
        for k in pair[0]:
            claims += zip([one[k] for one in pair], said[k].split(" / "), strict=True)
    (most,) = said_of_drafts(text, r"With 64 sequences, a step verifies at most (\d+) drafts")
    words = r"much as seven, ([\d.]+) and ([\d.]+) times a step. A plain step of eight rows takes ([\d.]+)"
    steps = records["Qwen3-0.6B"]["figures"]["1 × 64"]
    us = H200.by_model("steps_by_rows")["Qwen3-0.6B"]["figures"]
    values = [median(steps[k]["verify"]) / median(steps[k]["plain"]) for k in ("1", "7")]
    values.append(us["8"]["median_us"] / us["1"]["median_us"])
    said_of_drafts(text, "(After 2,000 tokens, eight sequences with one draft take less time than without)")
    for record in records.values():
        one = record["figures"]["8 × 2000"]["1"]
        assert median(one["verify"]) < median(one["plain"])
    return [*claims, (MOST_VERIFIED // 64 - 1, most), *zip(values, said_of_drafts(text, words), strict=True)]


def said_of_drafts(text: str, pattern: str) -> tuple[str, ...]:
    """The groups of the one place where the section on drafts says ``pattern``."""
    (section,) = re.findall(r"### Verifying drafts\n(.*?)\n## ", text, re.DOTALL)
    return said(" ".join(section.split()), pattern)


def replayed_table(text: str) -> Claims:
    """Whole runs with drafts as multiples of plain ones, and what tokens and times of steps predict."""
    claims: Claims = []
    below: dict[str, list[float]] = {"7": [], "15": []}
    records = H200.by_model("verify_drafts")
    for model, n, *cells in rows(text, "replayed"):
        own = records[model]["figures"][f"{n} × 64"]
        kinds = [(name, k) for name in ("edit", "completion") for k in ("3", "7", "15")]
        for (name, k), cell in zip(kinds, cells, strict=True):
            if k not in own:
                assert cell == "–"
                continue
            run, s = own[k]["replayed"][name], own[k]["replayed"][name]["seconds_per_step"]
            gain = run["tokens_per_step"] * median(s["plain"]) / median(s["drafting"])
            predicted = run["tokens_per_step"] * median(own[k]["plain"]) / median(own[k]["verify"])
            claims += zip((gain, predicted), re.findall(r"[\d.]+", cell), strict=True)
            below["15" if k == "15" else "7"].append(100 * (1 - gain / predicted))
    words = r"runs are from (\d+)% above to (\d+)% below the prediction; with 15, (\d+) to (\d+)% below"
    values = [-min(below["7"]), max(below["7"]), min(below["15"]), max(below["15"])]
    return [*claims, *zip(values, said_of_drafts(text, words), strict=True)]


def drafts_of_shipped_models(text: str) -> Claims:
    """Whole runs of texts with drafts, as multiples of plain runs."""
    figure = r"([\d.]+)"
    three = rf"{figure}, {figure} and {figure}"
    words = rf"make \[rose-tiny\]\S+ {three} times as fast on edit, {three} on completion, {three} on prose; "
    words += rf"its draft model, {figure} to {figure} times: .*? eight passes of two layers to one of five\. "
    words += rf"\[rose-tiny-qwen3\]\S+ {figure} to {figure} times, by its draft model {figure} to {figure}\."
    values: list[float] = []
    for name in ("rose-tiny", "rose-tiny-qwen3"):
        gains: dict[str, list[float]] = {"ngram": [], "draft": []}
        texts = H200.figures(f"drafts-{name}")
        assert list(texts) == [*drafts.KINDS]
        for one in (texts[kind] for kind in drafts.TEXTS):
            assert list(one["seconds"]) == ["1", "8", "64"]
            for seconds in one["seconds"].values():
                for way, found in gains.items():
                    found.append(median(seconds["plain"]) / median(seconds[way]))
        both = [end for found in gains.values() for end in (min(found), max(found))]
        values += gains["ngram"] + both[2:] if name == "rose-tiny" else both
        shape = H200.load(f"drafts-{name}")["engine"]["model_shape"]
        smaller = H200.load(f"train-{name}-draft")["model"]
        layers = [one.get("n_layer") or one["num_hidden_layers"] for one in (smaller, shape)]
        assert (layers, H200.load(f"drafts-{name}")["drafts"]) == ([2, 5], 7)
    words += rf" Random ids, .*?: \[Qwen3-0.6B\]\S+ {figure} to {figure} times, with (\d+) to (\d+) requests;"
    words += rf" rose-tiny {figure} to {figure} times, with (\d+) to (\d+); "
    words += rf"rose-tiny-qwen3 {figure} to {figure} times, with (\d+) to (\d+)"
    for name in ("Qwen3-0.6B/drafts", "drafts-rose-tiny", "drafts-rose-tiny-qwen3"):
        runs = H200.figures(name, "random")["seconds"]
        ratios = [median(one["plain"]) / median(one["ngram"]) for one in runs.values()]
        values += [min(ratios), max(ratios), *(float(n) for n in (min(runs, key=int), max(runs, key=int)))]
    words += rf"\. Prose at temperature 1 .*?: rose-tiny {three} times, rose-tiny-qwen3 {three}"
    for name in ("rose-tiny", "rose-tiny-qwen3"):
        runs = H200.figures(f"drafts-{name}", drafts.SAMPLED)["seconds"]
        values += [median(one["plain"]) / median(one["ngram"]) for one in runs.values()]
    words += rf"\. On \[(\d+) CPU cores\]\S+ .*? to {three} times .*? with rose-tiny, "
    words += rf"{three} times with rose-tiny-qwen3"
    values.append(CPU.load("drafts-rose-tiny")["environment"]["cpu_cores"])
    for name in ("rose-tiny", "rose-tiny-qwen3"):
        runs = [CPU.figures(f"drafts-{name}", kind, "seconds", "1") for kind in drafts.TEXTS]
        values += [median(one["plain"]) / median(one["ngram"]) for one in runs]
    words += rf"\. In texts of 32,768 tokens, .*? in {figure} µs, that of each of 64 in {figure} µs"
    matching = H200.figures("suffix_match", "32768")
    values += [median(matching[n]) for n in ("1", "64")]
    return list(zip(values, said_of_drafts(text, words), strict=True))


def formats_tables(text: str) -> Claims:
    """Weights, keys and values of fewer bits: speed beside that of 16 bits, bytes, quality."""
    claims: Claims = []
    for table, record, forms in (
        ("formats", "formats", ("fp8", "int8", "int4")),
        ("heads", "formats_kv", ("kv-fp8", "fp8+kv-fp8")),
    ):
        for model, workload, *cells in rows(text, table):
            figures = H200.by_model(record)[model]["figures"]
            seconds = {form: median(s) for form, s in figures["seconds"][workload].items()}
            found = [figures["tokens"][workload] / seconds["none"]]
            claims += zip([*found, *(seconds["none"] / seconds[form] for form in forms)], cells, strict=True)
    faster = r"8 bits make steps of 1 to (\d+) sequences faster, 4 bits those of 1 to (\d+)"
    for model in ("Llama-3.1-8B", "Llama-3.2-1B"):
        up_to = {form: formats.pays_up_to(H200, model, form) for form in formats.WEIGHT_FORMS}
        assert up_to["int8"] == up_to["fp8"]
        claims += zip([up_to["fp8"], up_to["int4"]], said(" ".join(text.split()), faster), strict=True)
    steps = formats.equal_steps(H200, "Qwen3-0.6B")
    most = max(
        us / steps[form][n][1] for n, (_, us) in steps["none"].items() for form in formats.WEIGHT_FORMS
    )
    claims += zip([100 * (most - 1)], said(text, r"no step is more than (\d+)% faster"), strict=True)
    sizes = H200.by_model("formats")["Llama-3.1-8B"]["figures"]["weight_bytes"]
    found = [sum(sizes[form].values()) / 1e9 for form in ("none", "fp8", "int4")]
    pattern = r"of Llama-3.1-8B take (\S+) GB with 16 bits, (\S+) GB with 8 and (\S+) GB with 4\."
    claims += zip(found, said(" ".join(text.split()), pattern), strict=True)
    for model, figure, *cells in rows(text, "quality"):
        quality = CPU.figures(f"formats-{model}", "quality", "formats")
        names = ["none", "fp8", "int8", "int4", "int4, calibrated", "kv-fp8", "kv-int8"]
        names += [f"{form}, activations of 1 digit" for form in ("fp8", "int8")]
        name, factor = ("perplexity", 1) if figure == "perplexity" else ("kl", 1000)
        claims += zip([factor * quality[one][name] for one in names], cells, strict=True)
        if figure == "KL":
            assert quality["kv-int8"]["kl"] < quality["kv-fp8"]["kl"] / 10
    return claims


def host_of_w3(text: str) -> Claims:
    """How much longer W3 takes outside prefills and steps: more than half of what it takes longer."""
    runs = H200.figures("workloads_since", "gpt2", "W3")
    ms = {
        when: [
            1e3 * (whole - prefill - decode)
            for kinds in zip(
                *(runs[when][f"{kind}seconds"] for kind in ("", "prefill_", "decode_")), strict=True
            )
            for whole, prefill, decode in zip(*kinds, strict=True)
        ]
        for when in ("before", "now")
    }
    longer = median(ms["now"]) - median(ms["before"])
    whole = [1e3 * median(chain(*runs[when]["seconds"])) for when in ("before", "now")]
    assert "loses time mostly outside prefills and steps" in text and longer > 0.5 * (whole[1] - whole[0])
    return [(longer, said(text, r"takes ([\d.]+) ms longer")[0])]


def first_tokens(text: str) -> Claims:
    """Medians of Qwen3-0.6B and Llama-3.2-1B, in the order of the page."""
    (section,) = re.findall(r"### A first token\n(.*?)\n###", text, re.DOTALL)
    figures, found = H200.figures("last_trials", "first token").values(), []
    for name in ("LLM.generate", "engine.prefill"):
        found += [one[name]["median_ms"] for one in figures]
    found += [median(one["device_ms"]["two graphs"]) for one in figures]
    for name in ("two graphs", "one graph"):
        turns = (one["copy, graphs and synchronization"][name] for one in figures)
        found += [median(turn["median_ms"] for turn in one) for one in turns]
    return list(zip(found, re.findall(r"([\d.]+)\sms", section), strict=True))


def item_with(text: str, words: str) -> str:
    """The one list item with these words, on one line."""
    (item,) = (one for one in text.split("\n- ") if words in one)
    return " ".join(item.split())


def cache_hints(text: str) -> Claims:
    """Steps with cache hints as multiples of steps without: two small models, then two Llamas."""
    steps = {
        model: [median(chain(*one["cache hints"])) / median(chain(*one["as it is"])) for one in each.values()]
        for model, each in H200.figures("last_trials", "cache hints").items()
    }
    small, large = steps["gpt2"] + steps["Qwen3-0.6B"], steps["Llama-3.2-1B"] + steps["Llama-3.1-8B"]
    item = item_with(text, "Cache hints")
    sizes = {tuple(each) for each in H200.figures("last_trials", "cache hints").values()}
    assert {(one[0], one[-1]) for one in sizes} == {said(item, r"with (\d+) to (\d+) sequences")}
    found = [*re.findall(r"([\d.]+) to ([\d.]+)[;.]", item)[0], *said(item, r"-8B: ([\d.]+) to ([\d.]+)\.")]
    values = [min(small), max(small), min(large), max(large), 100 * (1 - min(large))]
    return list(zip(values, [*found, *said(item, r"at most (\d+)%")], strict=True))


def algorithms(text: str) -> Claims:
    """A layer's GEMMs by the fastest algorithms, as multiples of F.linear and of the first algorithm."""
    item, spans, of_first, single = item_with(text, "Other cuBLASLt algorithms"), {}, [], []
    for model, gemms in H200.figures("last_trials", "GEMMs").items():
        of_linear = []
        for n in next(iter(gemms.values())):
            us = [
                {name: median(turns) for name, turns in one[n]["turns_us"].items()} for one in gemms.values()
            ]
            best = [min(time for name, time in one.items() if name != "F.linear") for one in us]
            single += [time / one["F.linear"] for time, one in zip(best, us, strict=True)]
            of_linear.append(sum(best) / sum(one["F.linear"] for one in us))
            of_first.append(sum(best) / sum(one["algorithm 0"] for one in us))
        spans[model] = min(of_linear), max(of_linear)
    sizes = said(item, r"of (\d+) to ([\d,]+) tokens .* of the 8 that cuBLASLt")
    assert (list(gemms["qkv"])[0], list(gemms["qkv"])[-1]) == (sizes[0], sizes[1].replace(",", ""))
    claims: Claims = []
    for name in ("Llama-3.1-8B", "Llama-3.2-1B", "Qwen3-0.6B", "GPT-2 small"):
        found = said(item, rf"{name}: ([\d.]+) to ([\d.]+);")
        claims += zip(spans[RECORDED.get(name, name)], found, strict=True)
    found = said(
        item, r"single GEMM: ([\d.]+)\. .* same way: ([\d.]+) to ([\d.]+)\. .* most (\d+)% of the GEMMs"
    )
    values = min(single), min(of_first), max(of_first), 100 * (1 - min(of_first))
    return [*claims, *zip(values, found, strict=True)]


def mixed_passes(text: str) -> Claims:
    """The share of a run if each prefill beside decoding rows saved a step of the 99th percentile."""
    prefills = {name: one["prefills"] for name, one in H200.figures("last_trials", "prefills").items()}
    steps = {"gpt2": H200.figures("one_pass", "runs", "apart", "repeats")}
    for model in ("Llama-3.2-1B", "Llama-3.1-8B"):
        steps[model] = H200.by_model("MIX")[model]["results"]["offline"]["repeats"]

    def saved(model: str, name: str, least: int) -> float:
        run_s = median(chain(*H200.figures("workloads_since", model, name, "now", "seconds")))
        step_s = median(one["decode_step_p99_s"] for one in steps[model])
        return 100 * step_s / run_s * sum(rows > 0 and tokens >= least for tokens, _, rows in prefills[name])

    w8 = H200.figures("workloads_since", "gpt2", "W8", "now")
    free = 100 * median(chain(*w8["prefill_seconds"])) / median(chain(*w8["seconds"]))
    words = (
        r"about ([\d.]+)% of MIX; of W8 ([\d.]+)% with prefills of at least (\d+) tokens, and ([\d.]+)% even"
    )
    mix, large, least, whole = said(item_with(text, "Prompt tokens in the decode step's pass"), words)
    bounds = saved("gpt2", "W8", int(least)), free
    both = max(saved(model, "MIX", 1) for model in ("Llama-3.2-1B", "Llama-3.1-8B"))
    return [(both, mix), *zip(bounds, (large, whole), strict=True)]


def trials(text: str) -> Claims:
    """The least and the greatest multiple of a step of each form of GEMMs and attention that was tried."""
    claims: Claims = []
    for record, names in TRIALS.items():
        (item,) = (one for one in text.split("\n- ") if f"{record}.json" in one)
        figures = H200.figures(record)
        for name, span in zip(names, re.findall(r"([\d.]+) to\s+([\d.]+)[;.]", item), strict=True):
            steps = [one for model in figures[name].values() for one in model.values()]
            found = [median(one.pop(name)) / median(*one.values()) for one in map(dict, steps)]
            claims += zip((min(found), max(found)), span, strict=True)
    return claims


def prompts_table(text: str) -> Claims:
    """Attention of whole prompts against two libraries, TFLOP/s."""
    claims: Claims = []
    for model, size, *cells in rows(text, "prompts"):
        tokens = size.split("×")[1].strip().replace(",", "")
        speeds = load_exhibit("prompt_attention").tflop_s(ATTENTION[model][tokens])
        assert f"{ATTENTION[model][tokens]['prompts']} ×" in size
        claims += zip([speeds[name] for name in ("rosellm", "FlashAttention", "cuDNN")], cells, strict=True)
    return claims


CHECKS: dict[str, tuple[Callable[[str], Claims], ...]] = {
    "README.md": (results_table, single_streams),
    "docs/performance.md": (
        *(floor_speed, steps_table, heads, rows_table, tuned_table, whole_runs, first_tokens, prompts_table),
        *(since_table, host_of_w3, verify_table, replayed_table, drafts_of_shipped_models),
        formats_tables,
        *(cache_hints, algorithms, mixed_passes),
        *(single_streams, recorded_streams, trials),
    ),
}
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in CHECKS}
MEASURED = re.compile(r"(?<![\w.])([\d,]*\d(?:\.\d+)?)\*{0,2} (?:µs|ms|TB/s|tok/s|TFLOP/s)\b")


def complaints(page: str, text: str) -> list[str]:
    return [one for check in CHECKS[page] for one in wrong(check(text))]


def claimed(page: str) -> list[re.Match[str]]:
    """Every number of the page's tables, and every measured one in its sentences."""
    text, found = PAGES[page], []
    for table in re.finditer(
        r"<!-- (?:results|steps|rows|since|verify|replayed|formats|heads|quality|prompts) -->\n(.*?)<!-- /",
        text,
        re.DOTALL,
    ):
        for line in re.finditer(r"^\|(?!---).*\|$", table[0], re.MULTILINE):
            cells = line[0].split("|")[3:] if "vLLM" not in line[0] and "µs" not in line[0] else []
            start = table.start() + line.start() + len("|".join(line[0].split("|")[:3]))
            figures = re.compile(r"−?[\d,]*\d(?:\.\d+)?%?(?=\)? \|| [/(])")
            found += figures.finditer(text, start, table.start() + line.end()) if cells else []
    return [*found, *MEASURED.finditer(text)]


@pytest.mark.parametrize("page", CHECKS)
def test_every_figure_of_a_page_is_the_recorded_one(page):
    assert complaints(page, PAGES[page]) == []


@pytest.mark.parametrize("page", CHECKS)
def test_a_falsified_figure_is_found_wherever_it_stands(page, monkeypatch):
    monkeypatch.setattr(records, "_read", cache(records._read))  # each record is read once
    figures = claimed(page)
    assert len(figures) > 30
    missed = []
    for one in figures:
        text = falsified(PAGES[page], one.start(), one.end())
        with suppress(AssertionError, KeyError):  # a claim that cannot be read is found as well
            missed += [] if complaints(page, text) else [PAGES[page][one.start() - 40 : one.end() + 10]]
    assert missed == []


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))
def test_only_pages_whose_figures_are_checked_state_measured_ones(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert page in CHECKS or not MEASURED.findall(text)


def test_readmes_picture_is_described_as_the_records_say():
    """First the GPU waits, then it works, then it has less to do."""
    steps = busy.steps_of(H200, busy.README_BATCH)
    assert steps[0].share < 0.5 < 0.9 < steps[-1].share and steps[-1].us < steps[0].us / 10
