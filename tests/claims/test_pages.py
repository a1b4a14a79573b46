"""README's and docs' figures are those of the records: each is read out of the table or sentence itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rosellm.bench.workloads import MODEL_WORKLOADS, WORKLOADS, Workload
from rosellm.lab.records import records
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import Results, _rivals_file, find, floor_tok_s
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.steps.speculative import MOST_VERIFIED
from tests.claims import reading
from tests.claims.reading import ROOT, Page, falsified, number, on_one_line, pair_of, rows, said, wrong

busy, formats, models = map(load_exhibit, ("busy", "formats", "models"))

H200, H100, CPU = find(), find("nvidia-h100-80gb-hbm3"), find("cpu")
RIVALS = _rivals_file()
LEASE = RIVALS["one_lease_2026_11_26"]
ATTENTION = {model: record["figures"] for model, record in H200.by_model("prompt_attention").items()}
READ_TB_S, TFLOP_S = (max(H200.figures("ceilings", name)) for name in ("read_TB_s", "matmul_TFLOP_s"))
STREAMS = [one.load("llama_1b_protocol")["figures"]["medians"] for one in (H200, H100)]
MODELS = {
    "GPT-2 small": "gpt2",
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen2.5-1.5B (kernels not yet tuned for it)": "qwen2.5-1.5b",
    "Llama-3.2-1B": "llama-1b",
    "Llama-3.1-8B": "llama-8b",
}
README_WORKLOADS = {
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
SHOWN = ("GPT-2 small", "Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B")
RUNGS = {  # before and after, and the workloads whose steps are compared
    "one kernel for all layers": ("dependent_launch", "persistent_kernel", "W0 W1"),
    "tuning a kernel while it serves": ("pinned_h2d", "autotune", "W0 W1 W2 W3"),
}
Claims = list[tuple[float | str, str]]


def results_table(text: str) -> Claims:
    """Both engines' figures of one lease, and their ratio: above 1 where ours is better."""
    claims: Claims = []
    for model, workload, *cells in rows(text, "results"):
        together = "W2" if model == "GPT-2 small" else "D64"
        name = README_WORKLOADS.get(workload) or {"64 requests of 512, all together": together}[workload]
        figures = LEASE["figures"][MODELS[model]][name]
        theirs, ours = figures["vLLM 0.26.0"], figures["rosellm ab671af"]
        ratio = theirs / ours if figures["unit"] == "ms" else ours / theirs
        claims += zip((theirs, ours, ratio), cells, strict=True)
    return claims


def sentence(text: str, words: str) -> tuple[str, ...]:
    """The figures in the one place where the page says ``words``: a pattern with # for each figure."""
    return said(on_one_line(text), words.replace("#", r"([\d.]*\d)"))


def published_us() -> tuple[float, ...]:
    """Our decode step, the published megakernel's, and the published graph's."""
    (published,) = RIVALS["modern_models"]["published"].values()
    theirs = ("HazyResearch megakernel", "CUDA graph with programmatic dependent launch")
    return LEASE["llama_1b_protocol"]["decode only"], *(published[f"{one}, us a token"] for one in theirs)


def single_stream(text: str) -> Claims:
    """README's first figures: ours and the published ones of the same protocol on the same GPU model."""
    words = r"takes # µs per decode step here.* megakernel takes # µs on .* model, and a CUDA .* launch # µs"
    return [*zip(published_us(), sentence(text, words), strict=True)]


def faster_host(text: str) -> Claims:
    """README's first row by an older vLLM in the session with a faster host."""
    words = r"On a faster host, an older vLLM \(0.22.1\) reached ([\d,]+) tok/s on the first row's workload"
    return [(records.rivals("W0")["vLLM 0.22.1"]["W0"], *said(on_one_line(text), words))]


def single_streams(text: str) -> Claims:
    """The same with the whole call, and the records of an H200 and an H100."""
    words = (
        "# µs per decode step here and # µs per token of the whole call; # µs for the megakernel and # µs for"
    )
    words += r" .* another H200, # µs per decode step and # µs per token \(\[record"
    words += r".* an H100, .*, # µs per decode step and # µs per token \(\[record"
    ours, *theirs = published_us()
    call = LEASE["llama_1b_protocol"]["rosellm ab671af, LLM.generate, whole call / 128"]
    recorded = [one[name] for one in STREAMS for name in ("decode_us", "call_us")]
    return [*zip((ours, call, *theirs, *recorded), sentence(text, words), strict=True)]


def ceilings(text: str) -> Claims:
    """The rates that all bounds rest on."""
    words = "at # TB/s, and prompts multiplied at # TFLOP/s"
    return [*zip((READ_TB_S, TFLOP_S), sentence(text, words), strict=True)]


@cache
def whole_run(model: str, name: str) -> tuple[float, float, str]:
    """A whole run's figure, how near it is to its bound in per cent, and what bounds it."""
    workload = (WORKLOADS | MODEL_WORKLOADS)[name]
    if model == "GPT-2 small":
        record, bound = H200.record(name, BEST_RUNG), floor_tok_s(H200, name)
    else:
        record, bound = Results(H200.folder / model).load(name), models.floor(H200, model, name)
    value, (result,) = models.figure(record, workload), record["results"].values()
    near = bound / value if models.unit_of(workload) == "ms" else value / bound
    medians, tokens = result["medians"], workload.num_requests * (workload.prompt_tokens or 1)
    prompts = medians.get("prefill_time_s", 0) > medians["total_time_s"] / 2
    multiplies = prompts and tokens > TFLOP_S / READ_TB_S  # else reading 16-bit weights takes longer
    if near < 0.6:
        return value, 100 * near, "latency" if near / filled(medians, workload) < 0.6 else "empty slots"
    return value, 100 * near, "arithmetic" if multiplies else "memory"


def filled(medians: dict[str, float], workload: Workload) -> float:
    """The mean share of slots that a decode step fills; 1 if steps were not counted."""
    steps = medians.get("decode_steps")
    return medians["decode_tokens"] / steps / workload.max_batch_size if steps else 1.0


def workloads_table(text: str) -> Claims:
    """Whole runs, how near they come to their bounds, and what bounds them, from the smallest model on."""
    claims: Claims = []
    for names, _, *cells, bounds in rows(text, "workloads"):
        found = []
        for model, cell in zip(SHOWN, cells, strict=True):
            name = [one for one in names.split(", ") if (one[0] == "W") == (model == "GPT-2 small")]
            if name:
                *figures, bound = whole_run(model, *name)
                claims += zip(figures, cell.numbers(), strict=True)
                found.append((bound, model))
            else:
                claims.append(("–", cell))
        firsts = [(bound, next(each)[1]) for bound, each in groupby(found, key=lambda one: one[0])]
        words = [firsts[0][0], *(f"from {model} on, {bound}" for bound, model in firsts[1:])]
        claims.append(("; ".join(words), bounds))
    (medians,) = (one["medians"] for one in H200.record("W8", BEST_RUNG)["results"].values())
    slots = 100 * filled(medians, WORKLOADS["W8"]), WORKLOADS["W8"].max_batch_size
    return [*claims, *zip(slots, sentence(text, "its steps fill only #% of the # slots"), strict=True)]


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
        if 8 <= batch <= 64 and context < 1000:  # mostly the GEMMs; norms in the small modern models
            is_small = batch == 8 and model in ("Qwen3-0.6B", "Llama-3.2-1B")
            assert above[2] > above[0] if is_small else above[0] == max(above)
    return claims


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


def rules(text: str) -> Claims:
    """How much longer steps take by rules than tuned, at most: of one sequence, and of more."""
    turns = [one["steps"].values() for one in H200.load("tuned_others")["models"].values()]
    longer = [[100 * (median(n["before"]) / median(n["after"]) - 1) for n in one] for one in turns]
    words = r"rules took up to #% longer with one sequence, and up to #% with more"
    most = max(one[0] for one in longer), max(max(one[1:]) for one in longer)
    return [*zip(most, sentence(text, words), strict=True)]


def verify_table(text: str) -> Claims:
    """Steps with drafts against plain ones; whole runs with drafts, and what the steps predict."""
    claims: Claims = []
    records = H200.by_model("verify_drafts")
    assert {one["environment"]["device_name"] for one in records.values()} == {"NVIDIA H200"}
    sentence(text, "prompts of 64 / 2,000 tokens")
    for model, n, *cells, edit, completion in rows(text, "verify"):
        sizes = [records[model]["figures"][f"{n} × {tokens}"] for tokens in (64, 2000)]
        plain = [median(chain(*(one["plain"] for one in ways.values()))) for ways in sizes]
        claims += zip(plain, cells[0].numbers(), strict=True)
        for k, cell in zip(("1", "3", "7", "15"), cells[1:], strict=True):
            pair = [median(one[k]["verify"]) / median(one[k]["plain"]) for one in sizes if k in one]
            claims += zip(pair, cell.numbers(), strict=True) if pair else [("–", cell)]
        own = sizes[0].get("7", sizes[0]["3"])
        for name, cell in (("edit", edit), ("completion", completion)):
            tokens, s = (own["replayed"][name][key] for key in ("tokens_per_step", "seconds_per_step"))
            gain = tokens * median(s["plain"]) / median(s["drafting"])
            predicted = tokens * median(own["plain"]) / median(own["verify"])
            claims += zip((gain, predicted), cell.numbers(), strict=True)
    most = sentence(text, r"with 7 drafts \(# with 64 sequences\)")
    return [*claims, (MOST_VERIFIED // 64 - 1, *most)]


def drafts_table(text: str) -> Claims:
    """How many times as fast drafts make the shipped models; how long drafts take to be found."""
    claims: Claims = []
    for kind, _, *cells in rows(text, "drafts"):
        kind = {"prose, temperature 1": "sampled"}.get(kind, kind)
        for name in ("rose-tiny", "rose-tiny-qwen3"):
            runs = H200.figures(f"drafts-{name}", kind)["seconds"]
            assert list(runs) == ["1", "8", "64"]
            for way in ("ngram", "draft"):
                gains = [median(one["plain"]) / median(one[way]) for one in runs.values()]
                claims += zip(gains, cells.pop(0).numbers(), strict=True)
        for name, cell in zip(("rose-tiny", "rose-tiny-qwen3"), cells, strict=True):
            one = CPU.figures(f"drafts-{name}").get(kind, {}).get("seconds", {}).get("1")
            claims.append((median(one["plain"]) / median(one["ngram"]) if one else "–", cell))
    found = H200.figures("suffix_match", "32768")
    words = r"in a text of 32,768 tokens takes # µs, in 64 texts # µs"
    return [*claims, *zip([median(found[n]) for n in ("1", "64")], sentence(text, words), strict=True)]


def formats_table(text: str) -> Claims:
    """Speed with weights, keys and values of fewer bits beside that of 16 bits, and bytes."""
    claims: Claims = []
    for model, workload, plain, *cells in rows(text, "formats"):
        record = "formats_kv" if workload in ("L8K", "L32K", "MIX") else "formats"
        figures = H200.by_model(record)[model]["figures"]
        seconds = {form: median(s) for form, s in figures["seconds"][workload].items()}
        claims.append((figures["tokens"][workload] / seconds["none"], plain))
        for form, cell in zip(("fp8", "int8", "int4", "kv-fp8", "fp8+kv-fp8"), cells, strict=True):
            claims.append((seconds["none"] / seconds[form] if form in seconds else "–", cell))
    faster = r"8 bits make steps of 1 to # sequences faster, 4 bits those of 1 to #"
    for model in ("Llama-3.1-8B", "Llama-3.2-1B"):
        up_to = {form: formats.pays_up_to(H200, model, form) for form in formats.WEIGHT_FORMS}
        assert up_to["int8"] == up_to["fp8"]
        claims += zip([up_to["fp8"], up_to["int4"]], sentence(text, faster), strict=True)
    sizes = H200.by_model("formats")["Llama-3.1-8B"]["figures"]["weight_bytes"]
    found = [sum(sizes[form].values()) / 1e9 for form in ("none", "fp8", "int4")]
    pattern = r"of Llama-3.1-8B take # GB with 16 bits, # GB with 8 and # GB with 4\."
    return [*claims, *zip(found, sentence(text, pattern), strict=True)]


def quality_table(text: str) -> Claims:
    """Perplexity and KL divergence of the shipped models in each format."""
    claims: Claims = []
    for model, figure, *cells in rows(text, "quality"):
        quality = CPU.figures(f"formats-{model}", "quality", "formats")
        names = ["none", "fp8", "int8", "int4", "int4, calibrated", "kv-fp8", "kv-int8"]
        names += [f"{form}, activations of 1 digit" for form in ("fp8", "int8")]
        name, factor = ("perplexity", 1) if figure == "perplexity" else ("kl", 1000)
        claims += zip([factor * quality[one][name] for one in names], cells, strict=True)
    return claims


def first_token(text: str) -> Claims:
    """Qwen3-0.6B's time to the first token, its prefill's, and that of the two graphs."""
    one = H200.figures("last_trials", "first token", "Qwen3-0.6B")
    ways = one["copy, graphs and synchronization"]
    ms = {way: median(turn["median_ms"] for turn in turns) for way, turns in ways.items()}
    assert ms["one graph"] >= ms["two graphs"]
    words = r"after 64 took # ms .*? prefill took # ms, and its two CUDA graphs # ms"
    values = [one[name]["median_ms"] for name in ("LLM.generate", "engine.prefill")]
    values.append(median(one["device_ms"]["two graphs"]))
    return [*zip(values, sentence(text, words), strict=True)]


@cache
def multiples(record: str, name: str) -> dict[tuple[str, int], float]:
    """Time with a trial as a multiple of the time without it, by model and size."""
    if name == "other cuBLASLt algorithms":
        figures = H200.figures("last_trials", "GEMMs").items()
        return {(model, n): fastest(gemms, n) for model, gemms in figures for n in gemms["qkv"]}
    if name in RUNGS:
        before, after, loads = RUNGS[name]
        steps = {w: pair_of(after, before).step_us(w) for w in loads.split()}
        return {("gpt2", w): new.us / old.us for w, (old, new) in steps.items()}
    if name.startswith("prompt tokens"):
        pairs = both_ways_of("ttft_p50_s").items()
        return {("Qwen3-0.6B", f"256 × {cell}"): joined / apart for cell, (apart, joined) in pairs}
    found = {}
    for model, sizes in H200.figures(record, name).items():
        for size, ways in sizes.items():
            us = {
                way: median(chain(*turns) if isinstance(turns[0], list) else turns)
                for way, turns in ways.items()
            }
            found[model, size] = us.pop(name) / median(us.values())
    return found


def both_ways_of(key: str) -> dict[tuple[float, int | None], tuple[float, float]]:
    """Load and chunk → a figure with prompts apart and joined."""
    cells = Results(H200.folder / "Qwen3-0.6B").figures("chunk_budget", "cells")
    found = {(one["share"], one["chunk"], one["way"]): figure_of(one, key) for one in cells}
    pairs = dict.fromkeys((share, chunk) for share, chunk, _ in found)
    return {pair: (found[*pair, "apart"], found[*pair, "joined"]) for pair in pairs}


def figure_of(cell: dict[str, Any], key: str) -> float:
    return load_exhibit("chunk_budget").goodput(cell, 0.2, 0.015) if key == "goodput" else cell[key]


def fastest(gemms: dict[str, Any], n: str) -> float:
    """The fastest algorithm of each of a layer's GEMMs, as a multiple of the first."""
    us = [{name: median(turns) for name, turns in one[n]["turns_us"].items()} for one in gemms.values()]
    best = [min(time for name, time in one.items() if name != "F.linear") for one in us]
    return sum(best) / sum(one["algorithm 0"] for one in us)


def trials_table(text: str) -> Claims:
    """The number of models, the least and greatest number of sequences, and the range of each trial."""
    claims: Claims = []
    tables = (rows(text, f"{part}_trials") for part in ("gemm", "attention", "step"))
    for trial, n_models, sequences, times, _verdict in chain.from_iterable(tables):
        name, record = said(trial, r"^\[(.*)\]\(.*/(\w+)\.(?:json|ipynb)\)$")
        if times == "–":  # the notebook has the figures
            continue
        found = multiples(record, name)
        claims += zip((min(found.values()), max(found.values())), times.numbers(), strict=True)
        claims.append((len({model for model, _ in found}), n_models))
        rows_of = {WORKLOADS[n].max_batch_size if n in WORKLOADS else int(n.split(" ×")[0]) for _, n in found}
        if sequences != "–":
            claims += zip(sorted({min(rows_of), max(rows_of)}), sequences.numbers(), strict=True)
    goodput = both_ways_of("goodput")
    best = [max(pair for cell, pair in goodput.items() if cell[0] == share) for share, _ in goodput]
    gains = sorted({joined / apart for apart, joined in best})
    words = r"at the best chunk size, goodput is ([\d.]+) to ([\d.]+) times as high"
    return [*claims, *zip((gains[0], gains[-1]), said(text, words), strict=True)]


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
    "README.md": (results_table, single_stream, faster_host),
    "docs/performance.md": (
        *(ceilings, workloads_table, steps_table, first_token, rows_table, rules, verify_table, drafts_table),
        *(formats_table, quality_table, prompts_table, single_streams, trials_table),
    ),
}
PAGES = {page: Page.read(ROOT / page) for page in CHECKS}
MEASURED = re.compile(r"(?<![\w.])([\d,]*\d(?:\.\d+)?)\*{0,2} (?:µs|ms|TB/s|tok/s|TFLOP/s)\b")


def finds(check: Callable[[str], Claims], text: str) -> bool:
    """Whether a check finds a wrong figure; a claim that cannot be read is found as well."""
    try:
        return bool(wrong(check(text)))
    except (AssertionError, KeyError):
        return True


def claimed(page: str) -> list[re.Match[str]]:
    """Every number of the page's tables, and every measured one in its sentences."""
    text, found = PAGES[page], []
    for table in re.finditer(r"^<!-- \w+ -->\n(?:\|.*\n){2}((?:\|.*\n)+)", text, re.MULTILINE):
        for line in re.finditer(r"^((?:\|[^|]*){2})\|.*\n", table[1], re.MULTILINE):
            figures = re.compile(r"−?[\d,]*\d(?:\.\d+)?%?(?=\)? \|| [/(]| to \d)")
            found += figures.finditer(text, table.start(1) + line.end(1), table.start(1) + line.end())
    return [*found, *MEASURED.finditer(text)]


@pytest.mark.parametrize(
    ("page", "check"), [(page, check) for page, checks in CHECKS.items() for check in checks]
)
def test_every_figure_of_a_page_is_the_recorded_one(page, check):
    assert wrong(check(PAGES[page])) == []


@pytest.mark.parametrize("page", CHECKS)
def test_a_falsified_figure_is_found_wherever_it_stands(page, monkeypatch):
    monkeypatch.setattr(records, "_read", cache(records._read))  # each record is read once
    figures, checks, missed = claimed(page), list(CHECKS[page]), []
    assert len(figures) > 30
    for one in figures:
        text = falsified(PAGES[page], one.start(), one.end())
        finder = next((check for check in checks if finds(check, text)), None)
        if finder is None:
            missed.append(PAGES[page][one.start() - 40 : one.end() + 10])
        else:  # it probably finds the next one, too
            checks = [finder, *(check for check in checks if check is not finder)]
    assert missed == []


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))
def test_only_pages_whose_figures_are_checked_state_measured_ones(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert page in CHECKS or not MEASURED.findall(text)


def test_readmes_picture_is_described_as_the_records_say():
    """First the GPU waits, then it works, then it has less to do."""
    steps = busy.steps_of(H200, busy.README_BATCH)
    assert steps[0].share < 0.5 < 0.9 < steps[-1].share and steps[-1].us < steps[0].us / 10


@pytest.mark.parametrize(
    ("page", "figure"), [("docs/performance.md", "128"), ("notebooks/40_weights.ipynb", "64")]
)
def test_corrections_write_the_recorded_figure_where_a_wrong_one_stands(tmp_path, monkeypatch, page, figure):
    monkeypatch.setattr(reading, "CORRECTIONS", defaultdict(dict))
    path, right = tmp_path / Path(page).name, (ROOT / page).read_text(encoding="utf-8")
    words = {"128": "one at a time, 128 new tokens", "64": "eight and 64 sequences"}[figure]
    assert right.count(words) == 1
    path.write_text(right.replace(words, words.replace(figure, "1")), encoding="utf-8")
    pattern = words.replace(figure, r"(\d+)")
    assert wrong([(float(figure), *said(on_one_line(Page.read(path)), pattern))]) == [f"1, recorded {figure}"]
    reading.correct()
    assert path.read_text(encoding="utf-8") == right
