"""The notebooks from index buffers to split KV: their text says what the records say."""

from __future__ import annotations

from statistics import median

from rosellm.bench.workloads import WORKLOADS
from rosellm.lab.recorded import RecordedPair
from rosellm.lab.records.records import find, read_us
from rosellm.lab.records.step_time import step_times
from rosellm.lab.records.trace import Trace
from rosellm.lab.records.verdicts import WORKLOADS as VERDICTS
from rosellm.roseinfer.layers.attention import variant_for
from tests.claims.reading import claim, number, pair_of, predicted, prose, said

RESULTS = find()
BATCHES = {"W0": 1, "W1": 8, "W2": 64, "W3": 256}


def says(notebook: str, words: str) -> None:
    said(prose(notebook), words)


def saved(pair: RecordedPair) -> dict[str, float]:
    """Workload → the µs by which a step gets shorter."""
    return {w: old.us - new.us for w in BATCHES for old, new in [pair.step_us(w)]}


def least_saved(pair: RecordedPair) -> dict[str, float]:
    """The same between the least favourable engines."""
    return {w: old.range_us[0] - new.range_us[1] for w in BATCHES for old, new in [pair.step_us(w)]}


def shorter(pair: RecordedPair) -> dict[str, float]:
    """Workload → the share of a step that goes."""
    return {w: 1 - new.us / old.us for w in BATCHES for old, new in [pair.step_us(w)]}


def short_of(savings: dict[str, float], wanted: dict[str, float]) -> list[str]:
    return [workload for workload, us in savings.items() if us < wanted[workload]]


def faster(pair: RecordedPair) -> list[str]:
    return [workload for workload, one in pair.verdicts().items() if one.sign == 1]


def undecided(pair: RecordedPair) -> list[str]:
    return [workload for workload, one in pair.verdicts().items() if one.sign == 0]


def idle_us(ledger, *causes: str) -> float:
    """The µs in which the GPU waits for the host because of causes that end so."""
    return sum(row.us for row in ledger.rows if row.cause.endswith(causes))


def less(pair: RecordedPair, batch: int, cause: str) -> float:
    """The µs by which a cause takes less of a ledger's step."""
    before, after = pair.ledger_before(batch).us_by_cause(), pair.ledger(batch).us_by_cause()
    return before.get(cause, 0.0) - after.get(cause, 0.0)


def ablation_us(pair: RecordedPair, workload: str) -> list[float]:
    """µs a step of the rung before, of what is between the two, and of the rung itself."""
    turns = RESULTS.figures(f"ablations-{workload}", pair.after)["turns_us"]
    return [one.us for one in step_times(turns).values()]


def test_no_fixed_price_per_copy_explains_how_much_shorter_a_step_gets():
    pair, foreseen = pair_of("reused_index_buffers"), predicted("10")
    gone = {workload: saved(pair)[workload] for workload in foreseen}
    shorter = [100 * us / pair.step_us(w)[0].us for w, us in gone.items()]
    claim("10", r"64 and 256 sequences, by (\d+) to (\d+) %", min(shorter), max(shorter))
    claim("10", r"A step gets (\d+) to (\d+) % shorter", min(shorter), max(shorter))
    says("10", r"more than twice the prediction, at 8 and 64 within a fifth of it")
    share = {workload: us / foreseen[workload] for workload, us in gone.items()}
    assert share["W3"] > 2 and all(abs(share[w] - 1) < 0.2 for w in ("W1", "W2"))
    says("10", r"saves at least twice as much at 256 as at 64")  # a prediction is a price per copy
    assert share["W3"] > 2 * share["W2"]


def test_copies_and_waits_are_the_smaller_part():
    pair = pair_of("reused_index_buffers")
    waits = less(pair, 256, "copies") + less(pair, 256, "synchronisation")
    ledgers = pair.ledger_before(256), pair.ledger(256)
    before, after = (idle_us(one, "kv_append") for one in ledgers)
    words = r"they take only (\d+) µs less at batch 256\. But the GPU was also idle for (\d+) µs"
    claim("10", words, waits, before)
    says("10", r"the host does all of this while the model runs\. At batch 8 not all of it")
    assert after == 0
    small = pair.ledger(8), pair.ledger_before(8)
    python = [idle_us(one, "kv_append") for one in small]
    launches = [one.us_by_cause()["launch latency"] for one in small]
    words = (
        r"waits (\d+) µs for the append's Python \((\d+) before\), and (\d+) µs for launches \((\d+) before\)"
    )
    claim("10", words, *python, *launches)


def test_sending_what_changed_pays_on_w0_to_w3_and_saves_more_than_predicted():
    pair = pair_of("resident_tables")
    gains = [100 * pair.gain(w) for w in BATCHES]
    claim("09", r"makes W0 to W3 (\d+) to (\d+) % faster", min(gains), max(gains))
    assert faster(pair) == list(BATCHES) and undecided(pair) == ["W4", "W5"]
    says("09", r"W0 to W2 save more than predicted")
    foreseen = predicted("09", 1)
    assert all(saved(pair)[w] > foreseen[w] for w in ("W0", "W1", "W2"))


def test_one_table_gains_most_in_large_batches_where_the_host_gains_most():
    pair = pair_of("one_table")
    says("09", r"`mutable_block_info` and `one_table`: most at batch 256")
    assert "W3" in faster(pair) and max(BATCHES, key=pair.gain) == "W3"
    says("09", r"The larger the batch, the more it saves: at 256 sequences a quarter of the step or more")
    in_order = [*saved(pair).values()]
    assert in_order == sorted(in_order) and in_order[-1] > 0.25 * pair.step_us("W3")[0].us
    says("09", r"The host's time shrinks most at 256, launch latency at 64")
    for cause, batch in {"host": 256, "launch latency": 64}.items():
        assert max(BATCHES.values(), key=lambda n, cause=cause: less(pair, n, cause)) == batch


def test_the_host_hardly_waits_before_the_resident_step_and_the_gpu_does():
    pair = pair_of("resident_step")
    recorded = RESULTS.figures("timelines", pair.after)
    before, after = (Trace.from_dict(recorded[rung]).events for rung in (pair.before, pair.after))
    length = max(one.end for one in before) - min(one.start for one in before)
    waits = sum(one.duration for one in before if one.kind == "sync")
    claim("13", r"the host waits for only (\d+) % of the recorded time", 100 * waits / length)
    ledgers = [pair.ledger_before(batch) for batch in BATCHES.values()]
    parts = [{cause: 100 * us / one.step_us for cause, us in one.us_by_cause().items()} for one in ledgers]
    idle = [one["host"] + one["launch latency"] for one in parts]
    claim("13", r"the GPU waits for the host for (\d+) to (\d+) % of a step", min(idle), max(idle))
    says("13", r"hence the idle GPU at its left edge")
    assert min(one.start for one in after if one.kind == "kernel") > 300


def test_the_resident_step_saves_what_is_said():
    pair, foreseen = pair_of("resident_step"), predicted("13")
    says("13", r"on every workload compared; the GPU is busy")
    assert faster(pair) == [*pair.verdicts()]
    says("13", r"A step gets about a third shorter, or more; whole runs gain least at 256 sequences")
    assert all(us > 0.3 * pair.step_us(w)[0].us for w, us in saved(pair).items())
    assert min(BATCHES, key=pair.gain) == "W3"
    says("13", r"At 8 and 64, the whole range over engines lies above the prediction")
    assert not {"W1", "W2"} & set(short_of(least_saved(pair), foreseen))


def test_a_resident_step_takes_longer_than_thought_because_gaps_grow():
    pair = pair_of("resident_step")
    beyond, gaps = [], []
    for batch in (1, 8, 64):
        before, after = pair.ledger_before(batch), pair.ledger(batch)
        stays = sum(row.us for row in before.rows if row.kind == "work" or row.cause == "between kernels")
        beyond.append(after.step_us - stays + less(pair, batch, "append"))
        gaps.append(-less(pair, batch, "between kernels"))
    says("13", r"one kernel per layer at every batch size, which is faster")
    assert all(less(pair, batch, "append") > 0 for batch in BATCHES.values())
    words = r"take (\d+) to (\d+) µs longer than what we predicted would stay, mostly because the gaps"
    claim("13", words, min(beyond), max(beyond))
    assert all(gap > 0.75 * us for gap, us in zip(gaps, beyond, strict=True))
    says("13", r"small kernels now make the inputs that Python made before")
    ledgers = [(pair.ledger_before(one).us_by_cause(), pair.ledger(one).us_by_cause()) for one in (1, 8, 64)]
    assert all("inputs" not in before and after["inputs"] > 0 for before, after in ledgers)


def test_tokens_of_a_stream_come_sooner_from_the_resident_step():
    says("13", r"the time between tokens and the wait for a first token fall by more than a third")
    for figure in ("itl_p50_s", "ttft_p50_s"):
        before, after = (median(RESULTS.repeats("W5", one, figure)) for one in ("one_table", "resident_step"))
        assert 1 - after / before > 1 / 3
    queue = WORKLOADS["W5"].num_requests, WORKLOADS["W5"].max_batch_size
    claim("13", r"because (\d+) requests queue for (\d+) places", *queue)


def prefill_ms(workload: str, rung: str) -> float:
    return 1e3 * RESULTS.value(workload, rung, "prefill_time_s")


def times_as_fast(workload: str) -> float:
    return prefill_ms(workload, "resident_step") / prefill_ms(workload, "packed_prefill")


def test_packed_prefills_are_as_fast_as_said():
    pair, small = pair_of("packed_prefill"), [times_as_fast(one) for one in BATCHES]
    words = r"takes about half the time or less; large ones \(W6, W7\) are ([\d.]+) times as fast"
    for large in ("W6", "W7"):
        claim("14", words, times_as_fast(large))
    assert min(small) > 1.8
    says("14", r"the prompts of W0 to W3 need none")
    claim(
        "14",
        r"Without a graph, it took ([\d.]+) and ([\d.]+) ms",
        *(prefill_ms(w, pair.before) for w in ("W2", "W3")),
    )
    assert {WORKLOADS[one].prompt_repeats for one in BATCHES} == {(1,)}
    first = [[1e3 * s for s in RESULTS.repeats("W4", one, "ttft_p50_s")] for one in (pair.after, pair.before)]
    claim("14", r"time to first token falls from ([\d.]+) to ([\d.]+) ms", *map(median, reversed(first)))
    says("14", r"it is shorter in every repeat than in any repeat before")
    assert max(first[0]) < min(first[1])
    says("14", r"after a single prefill gain least: W0 and W2")
    assert max(pair.gain("W0"), pair.gain("W2")) < min(0.03, *map(pair.gain, ("W1", "W3", "W4", "W5")))
    longer = [prefill_ms(w, pair.after) - pair.step_us(w)[0].us / 1e3 for w in ("W0", "W2", "W3")]
    claim("14", r"rows takes ([\d.]+) to ([\d.]+) ms longer than a decode step", min(longer), max(longer))


def test_the_rewrite_gives_more_than_the_fusion_that_gave_the_rung_its_name():
    pair, foreseen = pair_of("fused_append"), predicted("15")
    says("15", r"Faster, and by more than predicted, but mostly not because of the fusion")
    assert short_of(least_saved(pair), foreseen) == []
    steps = {workload: ablation_us(pair, workload) for workload in BATCHES}
    says("15", r"gives more than two thirds of the gain\. Fusing .* within a tenth of the prediction")
    assert all(before - between > 2 * (between - after) for before, between, after in steps.values())
    assert all(abs(foreseen[w] / (between - after) - 1) < 0.1 for w, (_, between, after) in steps.items())
    says("15", r"shows no gaps between its kernels, so the prediction leaves them out")
    assert pair.ledger_before(8).us_by_cause()["between kernels"] == 0
    rows = {row.cause: row for row in pair_of("packed_prefill").ledger_before(8).rows}
    counts = {"append": 12, "inputs": 8, "between kernels": 20}
    other = sum(rows[one].us / rows[one].launches * n for one, n in counts.items())
    claim("15", r"whose decode step is the same, predicts (\d+) µs, not (\d+)", other, foreseen["W1"])


def test_fused_norms_and_activations_save_what_is_said():
    norm, gelu = pair_of("fused_norm"), pair_of("fused_gelu")
    counts = RESULTS.figures("counts")

    def fewer(pair):
        return {counts[n][pair.before]["kernels"] - counts[n][pair.after]["kernels"] for n in ("8", "64")}

    def share(savings, table):
        return [us / predicted("16", table)[workload] for workload, us in savings.items()]

    shorter = {w: 100 * us / norm.step_us(w)[0].us for w, us in saved(norm).items()}
    words = r"fused_norm` makes a step (\d+) to (\d+) % shorter, most with few sequences"
    claim("16", words, min(shorter.values()), max(shorter.values()))
    assert min(shorter["W0"], shorter["W1"]) > max(shorter["W2"], shorter["W3"])
    words, times = r"has (\d+) fewer kernels, .* saves ([\d.]+) to ([\d.]+) times", share(saved(norm), 0)
    claim("16", words, *fewer(norm), min(times), max(times))
    gains = [100 * us / gelu.step_us(w)[0].us for w, us in saved(gelu).items()]
    claim("16", r"fused_gelu` makes a step ([\d.]+) to ([\d.]+) % shorter", min(gains), max(gains))
    by_steps = [100 * one for one in share(saved(gelu), 1)]
    words = r"Twelve kernels go, and timed steps save (\d+) to (\d+) % of the prediction"
    claim("16", words, min(by_steps), max(by_steps))
    assert fewer(gelu) == {12} and min(least_saved(gelu).values()) > 0


def test_the_kernels_that_stay_take_other_times():
    norm, gelu, foreseen = pair_of("fused_norm"), pair_of("fused_gelu"), predicted("16")
    (most,) = said(prose("16"), r"takes less than (\d+) % of the library's norm alone, which is most of what")
    for workload, us in saved(norm).items():
        before = norm.ledger_before(BATCHES[workload]).us_by_cause()["norm"]
        shorter = less(norm, BATCHES[workload], "norm")
        assert 1 - shorter / before < number(most) / 100 and shorter > 0.5 * (us - foreseen[workload])
    norms = [less(norm, batch, "norm") for batch in BATCHES.values()]
    claim("16", r"The norms save (\d+) to (\d+) µs at all four batch sizes", min(norms), max(norms))
    gemms = [less(norm, batch, "GEMM") for batch in BATCHES.values()]
    claim("16", r"GEMMs take (\d+) to (\d+) µs less, probably", min(gemms), max(gemms))
    longer = [-less(gelu, batch, "GEMM") for batch in (1, 64, 256)]
    words = r"makes them (\d+) to (\d+) µs longer again at batches 1, 64 and 256, but not at 8"
    claim("16", words, min(longer), max(longer))
    assert less(gelu, 8, "GEMM") > 0


def test_memory_traffic_is_not_what_fused_kernels_save():
    x, hidden = (read_us(RESULTS, 12 * 256 * 2 * n) for n in (2 * 768, 2 * 3072))
    claim("16", r"reading back the 24 sums takes ([\d.]+) µs, .* GELU's input ([\d.]+) µs", x, hidden)


def test_the_head_gains_by_padding_more_than_by_keeping_no_logits():
    pair, foreseen, gone = pair_of("fused_head"), predicted("18"), saved(pair_of("fused_head"))
    share = shorter(pair)
    words = r"Every step gets shorter, by (\d+) % at batch 1 and .* a quarter .* within an eighth of"
    claim("18", words, 100 * share["W0"])
    assert share["W3"] == max(share.values()) > 1 / 4 and min(least_saved(pair).values()) > 0
    assert all(abs(gone[w] / foreseen[w] - 1) < 1 / 8 for w in gone)
    says("18", r"gives nine tenths of the gain, at 8 and 64 more than half; only at 1 does the fused")
    steps = {workload: ablation_us(pair, workload) for workload in BATCHES}
    share = {w: (before - padded) / (before - after) for w, (before, padded, after) in steps.items()}
    assert 0.88 < share["W3"] < 0.92 and share["W0"] < 0.5 < min(share["W1"], share["W2"])
    moved = 2 * 256 * 50257 * 2
    words = r"The logits of 256 rows take (\d+) MB; writing and reading them takes (\d+) µs"
    claim("18", words, moved / 2e6, read_us(RESULTS, moved))


def test_gemms_for_few_rows_gain_where_it_is_said():
    pair, gone = pair_of("small_gemm"), saved(pair_of("small_gemm"))
    by_cause = {n: [less(pair, n, one) for one in ("norm", "GEMM")] for n in BATCHES.values()}
    words = r"by the ledgers, .* the norms take (\d+) µs less, the GEMMs themselves (\d+)\."
    claim("19", words, *by_cause[8])
    says("19", r"At batch 1, the GEMMs take longer, which cancels what the norms save\. Only at batch 64")
    assert by_cause[1][1] < 0 < by_cause[1][0] and abs(sum(by_cause[1])) < 5
    assert by_cause[64][1] > 60 > 15 > max(by_cause[n][1] for n in (1, 8, 256))
    says("19", r"from batch 17 on, and slower: .* At batch 256, GEMMs and norms both take longer")
    assert by_cause[64][0] < 0 and max(by_cause[256]) < 0
    says("19", r"gets shorter; one of a single sequence hardly changes, and one of 256 gets up to 5 % longer")
    says("19", r"`small_gemm`: a step of 256 sequences gets up to 5 % longer")
    least = least_saved(pair)
    assert min(least["W1"], least["W2"]) > 0 and -0.05 < shorter(pair)["W3"] < 0
    assert abs(shorter(pair)["W0"]) < 0.02
    says("19", r"At every batch size, less is saved than predicted")
    assert all(gone[w] < us for w, us in predicted("19", 0).items())


def test_dependent_launches_pay_where_it_is_said():
    pair, foreseen = pair_of("dependent_launch"), predicted("19", 1)
    says("19", r"Every step gets shorter, at batch 1 by about half")
    says("19", r"`dependent_launch`: every step, most at batch 1")
    share = shorter(pair)
    assert min(least_saved(pair).values()) > 0 and 0.4 < share["W0"] == max(share.values()) < 0.6
    says("19", r"predicts too little at batches 1 and 8, and too much at 64 and 256")
    assert short_of(saved(pair), foreseen) == ["W2", "W3"]
    says("19", r"At batch 8, the gaps alone are less than half of what is saved")
    recorded = Trace.from_dict(RESULTS.figures("timelines", pair.after, pair.before))
    kernels = [one for one in recorded.events if one.on_gpu]
    gap = median(later.start - one.end for one, later in zip(kernels, kernels[1:], strict=False))
    assert 0 < gap * len(kernels) / 2 < saved(pair)["W1"] / 2


def test_overlap_is_not_the_whole_gain_of_dependent_launches():
    pair = pair_of("dependent_launch")
    steps = {workload: ablation_us(pair, workload) for workload in BATCHES}
    launch = {w: before - at_end for w, (before, at_end, _) in steps.items()}
    overlap = {w: at_end - after for w, (_, at_end, after) in steps.items()}
    share = {w: launch[w] / (launch[w] + overlap[w]) for w in steps}
    says("19", r"Overlap gives most of the saving at batch 8, and about half at 64 and 256")
    assert share["W1"] < 0.25 and all(0.4 < share[w] < 0.6 for w in ("W2", "W3"))
    claim("19", r"the cheaper launch alone gives (\d+) %", 100 * share["W0"])
    says("19", r"Overlap saves far more at batch 8, .* than at 64")
    assert overlap["W1"] > 5 * overlap["W2"]
    words = r"alone saves (\d+) µs, although all launches should cost (\d+)"
    claim("19", words, launch["W0"], predicted("19", 1)["W0"])
    says("19", r"There, `small_gemm` is slower for one sequence than for eight, .* ledgers place it in")
    one, eight = (pair.ledger_before(n).us_by_cause()["GEMM"] for n in (1, 8))
    assert steps["W0"][0] > steps["W1"][0] and one - eight > 40


ROWS, CONTEXTS = (1, 2, 4, 8), (256, 512, 768, 1000)
GRID = [(rows, n) for rows in ROWS for n in CONTEXTS]


def grid_us(rung: str, rows: int, context: int) -> float:
    return RESULTS.row("grid", "few", rung, batch=rows, context=context)["step_us"]


def test_a_context_costs_whole_tiles_and_no_workload_was_split():
    us = {key: grid_us("dependent_launch", *key) for key in GRID}
    second = [us[rows, 512] - us[rows, 256] for rows in ROWS]
    claim("21", r"and a step takes (\d+) to (\d+) µs longer than at 256", min(second), max(second))
    says("21", r"From 512 to 1,000 tokens, steps of one or two rows hardly get longer")
    assert all(abs(us[rows, 1000] - us[rows, 512]) < 6 < min(second) / 5 for rows in (1, 2))
    loads = {name: WORKLOADS[name] for name in VERDICTS}
    longest = {name: max(one.prompt_repeats) + one.max_new_tokens - 2 for name, one in loads.items()}
    says("21", r"W0 stopped one token short; today's rule splits it")
    assert longest["W0"] == 511 and variant_for(1, 12, 511, 132).pieces > 0
    says("21", r"None of W0 to W5 reached the threshold\. .* No timed step gets longer beyond the noise")
    assert [w for w, n in longest.items() if loads[w].max_batch_size <= 8 and n >= 512] == []
    assert min(shorter(pair_of("split_kv")).values()) > -0.01  # engines differ by as much


def test_splitting_gains_what_is_said_beyond_the_control():
    gain = {key: 100 - 100 * grid_us("split_kv", *key) / grid_us("dependent_launch", *key) for key in GRID}
    words = r"The control differs by ([\d.]+) % at one row, so only changes of more than (\d+) % count here"
    differs, counts = map(number, said(prose("21"), words))
    assert abs(differs - gain[1, 256]) < 0.05 and differs < counts
    assert all(abs(gain[rows, 256]) < 1 for rows in ROWS[1:])
    by_rows = {rows: [gain[rows, n] for n in CONTEXTS[1:]] for rows in ROWS}
    words = r"one of two sequences (\d+) to (\d+) %, less than predicted; steps of four and eight do not"
    claim("21", words, min(by_rows[2]), max(by_rows[2]))
    says("21", r"a step of one long sequence a sixth shorter, about as much as predicted")
    assert all(15 < one < 19 for one in by_rows[1])
    us = {rung: {key: grid_us(rung, *key) for key in GRID} for rung in ("dependent_launch", "split_kv")}
    before, after = us.values()
    beyond = {(rows, n): before[rows, 256] - after[rows, n] for rows, n in GRID}  # saved, less predicted
    assert all(abs(beyond[1, n]) <= beyond[1, 256] < 8 and beyond[2, n] < -4 for n in CONTEXTS[1:])
    assert all(abs(one) < counts for rows in (4, 8) for one in by_rows[rows])
