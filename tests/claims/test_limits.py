"""Notebooks of a persistent kernel, numerics, faults and lengths: their text says what the records say."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import torch

from rosellm.bench.workloads import WORKLOADS
from rosellm.lab.recorded import MIXED_LEDGERS, RecordedPair
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import ceilings, find
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant, cut_rows, whole_rows
from rosellm.roseinfer.kernels.few_rows import _few_rows_shape
from tests.claims.reading import claim, number, prose, said, shown

RESULTS = find()
PERSISTENT = RecordedPair(before="dependent_launch", after="persistent_kernel", results=RESULTS)
PROCESSORS = 132  # of the recorded GPU
GPT2 = KNOWN_SHAPES["gpt2"]


# 22


def test_a_barrier_costs_more_than_the_launch_that_it_replaces():
    (us,) = said(prose("22"), r"takes about (\d+) µs longer than a kernel with its dependent launch")
    for batch in (1, 8):
        old, new = PERSISTENT.ledger_before(batch), PERSISTENT.ledger(batch)
        chain = [row for row in old.rows if row.cause in ("GEMM", "attention", "norm")]
        a_kernel = sum(row.us for row in chain) / sum(row.launches for row in chain)
        a_phase = (new.us_by_cause()["layers"] + new.us_by_cause()["norm"]) / 61
        assert shown(a_phase - a_kernel, us)


def test_the_persistent_kernel_is_slower_where_it_runs_and_changes_no_token():
    said(prose("22"), r"1 or 8 rows gets longer .* by at least a quarter\. With 64 or 256 it does not change")
    said(prose("22"), r"8 or fewer: a step gets at least a quarter longer")
    steps = {w: PERSISTENT.step_us(w) for w in ("W0", "W1", "W2", "W3")}
    longer = {w: new.us / old.us - 1 for w, (old, new) in steps.items()}
    assert min(longer["W0"], longer["W1"]) > 1 / 4 and max(abs(longer["W2"]), abs(longer["W3"])) < 0.01
    lost = ("W0", "W1", "W5")
    said(prose("22"), r"nowhere on the recorded GPU")
    assert not any(one.sign == 1 for one in PERSISTENT.verdicts().values())
    said(prose("22"), r"whole runs of 1 and 8 rows \(W0, W1, W5\) generate the same tokens")
    assert {WORKLOADS[w].max_batch_size for w in lost} == {1, 8}
    both = (PERSISTENT.before, PERSISTENT.after)
    assert all(len({sha for r in both for sha in RESULTS.repeats(w, r, "tokens_sha256")}) == 1 for w in lost)


# 23


COST, BITS = (RESULTS.figures("determinism", name) for name in ("cost", "bits"))


def test_the_mode_changes_no_bit_and_a_second_request_most():
    said(prose("23"), "With the mode not one bit changes, in three dtypes")
    assert len(BITS) == 3 and not any(n for kind in BITS.values() for n in kind["invariant"].values())
    percent = {name: 100 * kind["fast"]["2 together"] / GPT2.vocab_size for name, kind in BITS.items()}
    about, full = said(
        prose("23"), r"at least one bit of about (\d+) % of the logits in 16 bits, and of (\d+) % in fp32"
    )
    assert all(abs(percent[name] - number(about)) < 2 for name in ("float16", "bfloat16"))
    assert shown(percent["float32"], full)


def test_few_requests_change_equally_many_logits_in_16_bits_only():
    said(prose("23"), r"2, 8 and 16 requests change the same number of logits; in fp32 they do not")
    few = [{kind["fast"][f"{n} together"] for n in (2, 8, 16)} for kind in BITS.values()]
    assert list(map(len, few)) == [1, 1, 3] and list(BITS)[2] == "float32"
    said(prose("23"), r"the recorded `_few_rows_kernel` uses the same tiles for 2 and for 8")
    for n, k in ((2304, 768), (768, 3072)):
        assert _few_rows_shape(2, n, k, torch.float32) == _few_rows_shape(8, n, k, torch.float32)
    context = 150 + 24  # tokens of the prompt and new ones, in the record
    assert whole_rows(2, 12, context, PROCESSORS) == whole_rows(8, 12, context, PROCESSORS)


def test_the_recorded_kernels_change_at_the_rows_that_are_said():
    words = r"up to (\d+) rows ran `_few_rows_kernel`, and 17 to .* parts changed at (\d+) and at (\d+) rows"
    few, second, third = map(number, said(prose("23"), words))
    for kind in ("float16", "bfloat16"):
        counts = {how.split()[0]: n for how, n in BITS[kind]["fast"].items() if how.endswith("together")}
        ends = pairwise((1, few, second - 1, third - 1, 256))
        spans = [{n for rows, n in counts.items() if first < int(rows) <= last} for first, last in ends]
        assert list(map(len, spans)) == [1] * 4 and all(one != other for one, other in pairwise(spans))


def test_small_batches_pay_for_the_mode():
    lost = {n: 100 * COST[w]["cost"] for n, w in ((1, "W0"), (8, "W1"), (64, "W2"), (256, "W3"))}
    claim("23", r"the mode loses (\d+) % of the throughput, more than we predicted", lost[1])
    said(prose("23"), r"\(W1\) as much as we predicted; and .* a few percent, where we predicted no loss")
    steps = {n: PERSISTENT.ledger_before(n) for n in lost}
    own = {n: sum(map(one.us_by_cause().get, ("GEMM", "norm"))) for n, one in steps.items()}
    longer = {n: max(own[n], own[64]) - own[n] for n in lost}
    predicted = {n: 100 * longer[n] / (one.step_us + longer[n]) for n, one in steps.items()}
    assert lost[1] > predicted[1] + 2 and round(lost[8]) == round(predicted[8])
    assert 3 < lost[64] < lost[256] < 6.5 and predicted[64] == predicted[256] == 0
    repeats = zip(*(COST["W6"][numerics]["repeats"] for numerics in ("fast", "invariant")), strict=True)
    tok_s = [[one["total_throughput_tok_s"] for one in both] for both in repeats]
    turns = [100 * (1 - invariant / fast) for fast, invariant in tok_s]
    claim("23", r"its three repeats lost (\d+), (\d+) and (\d+) %", *turns)


# 24


def test_a_quarter_of_the_blocks_keeps_three_quarters_of_the_throughput():
    def kept(workload, figure):
        pools = RESULTS.figures("kv_pressure", workload)
        both = zip(*(pools[pool]["repeats"] for pool in ("ample", "tight")), strict=True)
        return [100 * tight[figure] / ample[figure] for ample, tight in both]

    said(prose("24"), "A quarter of the blocks keeps about three quarters of the throughput")
    w6, w7 = (kept(workload, "total_throughput_tok_s") for workload in ("W6", "W7"))
    assert all(abs(median(one) - 75) < 5 for one in (w6, w7))
    claim("24", r"Repeats of W6 are noisy \((\d+), (\d+) and (\d+) %\), those of W7 are not", *w6)
    assert max(w7) - min(w7) < 2
    steps = [median(kept(workload, "decode_step_p50_s")) for workload in ("W6", "W7")]
    claim("24", r"gets shorter, to (\d+) % in W6 and (\d+) % in W7, but not to a quarter", *steps)
    said(prose("24"), "Tokens differ between the pools")
    for pools in RESULTS.figures("kv_pressure").values():
        ample, tight = (pools[pool]["repeats"][0]["tokens_sha256"] for pool in ("ample", "tight"))
        assert ample != tight


# 25


def test_the_append_pays_as_a_kernel():
    rows, launch_us = RESULTS.load("kv_append")["rows"], ceilings()["cuda_graph_node_us"]
    us = {
        row["variant"]: row["medians_s"]["device_rotating"] * 1e6 for row in rows if row["batch_size"] == 256
    }
    fastest = min(("generic", "full_batch", "identity_pos"), key=us.__getitem__)
    words = r"best append writes 256 tokens in (\d+) µs, `index_put` in (\d+) µs"
    claim("25", words, us[fastest], us["index_put"])
    (tokens, times) = said(prose("25"), r"Below about (\d+) tokens the floor is .* takes (\S+) times that\.")
    bytes_per_token = rows[0]["bytes_moved"] / rows[0]["batch_size"]
    assert abs(launch_us * ceilings()["device_copy_TB_s"] * 1e6 / bytes_per_token - number(tokens)) < 15
    assert shown(us[fastest] / launch_us, times)
    by_the_host = [row["medians_s"]["wall"] * 1e6 for row in rows if row["variant"] == fastest]
    (wall_us,) = said(prose("25"), r"from Python, it takes about (\d+) µs at every size")
    assert all(shown(us, wall_us) for us in by_the_host)


# 30


lengths, programs = load_exhibit("lengths"), load_exhibit("programs")


def end(choose, rows, share="one long"):
    """When the model's last processor is done, as a multiple of the mean."""
    contexts = lengths.contexts_of(rows)[share]
    variant = choose(rows, GPT2.n_kv_heads, max(contexts), PROCESSORS, GPT2.group, GPT2.head_dim)
    dealt = programs.deal(contexts, variant, GPT2.n_kv_heads, PROCESSORS)
    return dealt.end / dealt.fair


def test_a_long_row_costs_less_the_more_rows_there_are():
    words = r"done after more than (\S+) times the mean, with 256 after less than (\S+) times\."
    few, many = map(number, said(prose("30"), words))
    ends = [end(whole_rows, rows) for rows in lengths.BATCHES]
    assert ends == sorted(ends, reverse=True) and ends[0] > few and ends[-1] < many
    (percent,) = said(prose("30"), r"Equal pieces stay within (\d+) % of the mean")
    cut = [end(cut_rows, rows, share) for rows in lengths.BATCHES for share in lengths.contexts_of(rows)]
    assert max(cut) < 1 + number(percent) / 100


def test_the_order_of_programs_does_most_of_the_harm():
    words = (
        r"at less than (\S+) times the mean instead of (\S+), if the long row's programs are launched first"
    )
    first, as_launched = said(prose("30"), words)
    heads = sorted(lengths.contexts_of(64)["one long"] * GPT2.n_heads, reverse=True)
    dealt = programs.deal(heads, Variant(tile=64), 1, PROCESSORS)
    assert dealt.end / dealt.fair < number(first) and shown(end(whole_rows, 64), as_launched)


def test_steps_are_near_their_floor_and_unequal_requests_empty_the_batch():
    w8 = Ledger.from_dict(find(MIXED_LEDGERS).figures("ledger_w8", "W8"))
    claim("30", r"a step of W8 takes (\S+) times as long", w8.step_us / w8.floor_us)

    def filled(workload):
        speeds = RESULTS.values(workload)
        rung, slots = max(speeds, key=lambda one: speeds[one]), WORKLOADS[workload].max_batch_size
        tokens, steps = (RESULTS.value(workload, rung, f"decode_{what}") for what in ("tokens", "steps"))
        return 100 * tokens / steps / slots

    claim("30", r"fills (\d+) % of its slots, a step of W6 (\d+) %", filled("W8"), filled("W6"))
