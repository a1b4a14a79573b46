"""Notebooks 00 to 09, in which Python does less per step: their text says what records and tables say."""

from __future__ import annotations

import re
from statistics import median

from rosellm.lab.recorded import RecordedPair
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import find, read_us
from rosellm.rosetrainer import paged_attention
from tests.claims.reading import claim, number, pair_of, predicted, prose, said, stored

RESULTS = find()
COUNTS = RESULTS.figures("counts")
BATCHES = (8, 64, 256)  # of W1, W2, W3


def signs(rung: str) -> dict[str, int]:
    return {workload: one.sign for workload, one in pair_of(rung).verdicts().items()}


def faster(rung: str) -> list[str]:
    """The workloads that gain beyond the noise; none may lose."""
    assert min(signs(rung).values()) == 0
    return [workload for workload, sign in signs(rung).items() if sign]


def step_saved(nb: RecordedPair, workload: str) -> float:
    old, new = nb.step_us(workload)
    return old.us - new.us


def run_saved(nb: RecordedPair, workload: str) -> float:
    old, new = nb.whole_run_us(workload)
    return old - new


def overlap(nb: RecordedPair, workload: str) -> bool:
    """Whether single engines of both rungs take the same time."""
    (low, high), (lowest, highest) = (one.range_us for one in nb.step_us(workload))
    return low < highest and lowest < high


def ledgers(nb: RecordedPair, batch: int) -> tuple[Ledger, Ledger]:
    return nb.ledger_before(batch), nb.ledger(batch)


def causes_us(nb: RecordedPair, batch: int) -> list[dict[str, float]]:
    return [{row.cause: row.us for row in one.rows} for one in ledgers(nb, batch)]


def append_us(variant: str, way: str, tokens: int = 256) -> float:
    return RESULTS.row("kv_append", variant=variant, batch_size=tokens)["medians_s"][way] * 1e6


def best_and_without(workload: str, field: str) -> tuple[list[float], list[float]]:
    """Tokens per second of the best recipe's repeats, and with this field set back."""
    runs = RESULTS.figures(f"leave_one_out-{workload}", "tok_s")
    return runs["none"], runs[field]


# 44 and 00


def test_reading_takes_as_small_a_part_of_the_first_rungs_step_as_is_said():
    (first, _), n_bytes = pair_of("split_kv", "dense").step_us("W0"), 247e6 + 256 * 2 * 12 * 768 * 2
    claim("44", r"with one sequence: (\d+) µs of ([\d,]+)\.", read_us(RESULTS, n_bytes), first.us)
    said(prose("44"), "Reading takes less than a hundredth of the first rung's step")
    assert read_us(RESULTS, n_bytes) < first.us / 100


def test_the_map_names_changes_that_gain_nothing():
    said(
        prose("00"),
        "`autotune` and `persistent_kernel` gain nowhere beyond the noise, and both lose somewhere",
    )
    assert max([*signs("autotune").values(), *signs("persistent_kernel").values()]) == 0
    assert signs("persistent_kernel")["W0"] == signs("persistent_kernel")["W1"] == -1
    assert min(signs("autotune").values()) == -1
    said(
        prose("00"), "`triton_append`, which stays on the ladder, makes no difference beyond the noise either"
    )
    assert {*signs("triton_append").values()} == {0}


def test_rungs_gain_as_much_as_the_map_says():
    said(prose("00"), "pinned tables, the CUDA graph, the resident step and dependent launches each have")
    for rung in ("paged", "pinned_h2d", "cuda_graph", "resident_step", "dependent_launch"):
        found = [one for one in pair_of(rung).verdicts().values() if one.workload in "W0 W1 W2 W3"]
        assert any(one.sign > 0 and one.ratio > 1.5 for one in found)


def test_with_few_sequences_the_first_rung_uses_a_sixth_of_a_step():
    said(prose("00"), "with 1 or 8 sequences it works for a sixth of a step at first")
    assert all(0.15 < pair_of("paged").ledger_before(batch).busy < 0.18 for batch in (1, 8))


def test_what_a_field_is_worth_on_the_best_rung_is_recorded():
    runner, tuples = ([best_and_without(f"W{n}", one) for n in (1, 2, 3)] for one in ("runner", "block_info"))
    then = [100 * pair_of("cuda_graph").gain(f"W{n}") for n in range(4)]
    claim("00", r"The CUDA graph gained (\d+) to (\d+) % when it was added", min(then), max(then))
    said(prose("00"), "without it, the best rung would take more than six times as long")
    assert all(median(best) > 6 * median(back) for best, back in runner)
    gained = 100 * pair_of("mutable_block_info").gain("W3")
    claim("00", r"`block_info` gained (\d+) % at W3 then, and no gain shows now", gained)
    assert "W3" in faster("mutable_block_info") and all(min(best) <= max(back) for best, back in tuples)
    (most,) = said(prose("00"), r"W1 and W2 change by less than (\d) %, and W3's repeats spread too far")
    assert all(abs(median(best) / median(back) - 1) < number(most) / 100 for best, back in tuples[:2])
    assert max(tuples[2][0]) > 1.1 * min(tuples[2][0])


def test_the_best_step_is_near_its_floor_and_has_no_host_time():
    nb, tokens = pair_of("split_kv", "dense"), {"W0": 256, "W1": 8 * 128, "W2": 64 * 256, "W3": 256 * 32}
    said(prose("00"), "takes two to four times its floor, .* 64 sequences goes: none of it to the host")
    floors = {workload: nb.read_us(247e6 + n * 2 * 12 * 768 * 2) for workload, n in tokens.items()}
    assert all(2 < nb.step_us(workload)[1].us / us < 4 for workload, us in floors.items())
    assert "host" not in nb.ledger(64).us_by_cause()


# 01


def test_every_engine_of_paged_attention_is_faster_with_up_to_64_sequences():
    nb, found = pair_of("paged"), pair_of("paged").verdicts()
    said(
        prose("01"), "up to 64 sequences, every engine of `paged` is faster .* With 256, their times overlap"
    )
    assert [step_saved(nb, workload) > 0 for workload in ("W0", "W1", "W2")] == 3 * [True]
    assert [overlap(nb, workload) for workload in ("W0", "W1", "W2", "W3")] == [False, False, False, True]
    said(prose("01"), "W0 and W1 gain a third or more, and none is slower beyond the noise; at W2 and W3")
    assert {"W0", "W1"} <= {*faster("paged")} and min(nb.gain("W0"), nb.gain("W1")) > 1 / 3
    few, many = (
        [found[name].spread / median(found[name].before) for name in two]
        for two in (("W0", "W1"), ("W2", "W3"))
    )
    assert max(few) < min(many)


def test_the_bytes_of_dense_attention_come_near_its_recorded_step_at_batch_256():
    said(prose("01"), "Only at batch 256: there, the bytes of 1,000 tokens take about as long as the step")
    said(prose("01"), "With fewer sequences they take less than half as long")
    nb, a_token = pair_of("paged"), 2 * 12 * 768 * 2
    moved = a_token * (2 * (2 * 16 * 64 + 1000) + 3 * 1001)  # of a sequence of 16 blocks of 64
    us = moved / (1e6 * RESULTS.load("ceilings")["figures"]["copy_TB_s"][0])
    share = {w: n * us / nb.step_us(w)[0].us for w, n in {"W0": 1, "W1": 8, "W2": 64, "W3": 256}.items()}
    assert 0.85 < share["W3"] < 1.15 and max(share["W0"], share["W1"], share["W2"]) < 0.5


def test_paged_attention_saves_copies_at_64_sequences_and_launches_below():
    two = {n: ledgers(pair_of("paged"), n) for n in (1, 8, 64)}
    busy = {n: (old.busy * old.step_us - new.busy * new.step_us) / 1e3 for n, (old, new) in two.items()}
    step = {n: (old.step_us - new.step_us) / 1e3 for n, (old, new) in two.items()}
    claim("01", r"GPU works (\S+) ms less, and the step is (\S+) ms shorter", busy[64], step[64])
    said(prose("01"), "nearly four times the prediction, .* only an eighth of what the step saves")
    assert 3.5 < 1e3 * step[64] / predicted("01")["W2"] < 4
    assert all(0.12 < busy[n] / step[n] < 0.13 for n in (1, 8))
    (fewer,) = {COUNTS[str(n)]["dense"]["kernels"] - COUNTS[str(n)]["paged"]["kernels"] for n in BATCHES}
    claim("01", r"a step has (\d+) fewer kernels to launch", fewer)


# 02


def mask_us(batch: int) -> tuple[float, float]:
    """The time of the mask's kernels, and by how much less the GPU waits without them."""
    old, new = causes_us(pair_of("no_mask"), batch)
    return old["mask"], old["host: build_mask"] - new["host: build_mask"]


def test_the_mask_costs_its_launches():
    (us,) = said(
        prose("02"), r"Its seven kernels keep .* some (\d+) µs, and the GPU waits at least six times as long"
    )
    assert {one["paged"]["kernels"] - one["no_mask"]["kernels"] for one in COUNTS.values()} == {7}
    parts = [mask_us(batch) for batch in (1, *BATCHES)]
    assert all(abs(gpu / number(us) - 1) < 0.2 and waiting > 6 * gpu for gpu, waiting in parts)
    said(
        prose("02"),
        "With and without the mask, the engines' steps take overlapping times at every batch size",
    )
    assert [overlap(pair_of("no_mask"), workload) for workload in ("W0", "W1", "W2", "W3")] == 4 * [True]


def test_the_masks_prediction_was_too_high():
    said(prose("02"), "The prediction was too high .* two parts add up to less than half of it")
    assert all(
        sum(mask_us(batch)) < us / 2 for us, batch in zip(predicted("02").values(), BATCHES, strict=True)
    )


def test_no_whole_run_shows_the_append():
    nb, promised = pair_of("triton_append"), predicted("02", 1)["W3"]
    old, new = (COUNTS["256"][rung]["gpu_time_us"] for rung in (nb.before, nb.after))
    claim("02", r"at batch 256 the GPU's time per step fell by a tenth \((\S+) to (\d+) µs\)", old, new)
    said(prose("02"), "W3's median step got shorter, but no whole run shows it beyond the noise")
    assert 0.08 < 1 - new / old < 0.13 and step_saved(nb, "W3") > 0
    assert {*signs("triton_append").values()} == {0}
    claim("02", r"only (\d+) % were predicted", 100 * promised / nb.step_us("W3")[0].us)


def test_the_hosts_work_is_in_index_tensors_and_tuples():
    said(
        prose("02"),
        "is a tenth of the host's work. Making the index tensors takes a quarter, and so does recording",
    )
    work = {one.name.strip("`"): one.us for one in pair_of("triton_append").ledger_before(256).functions}
    names = "kv_append_ref", "Indices|index_tensors", "advance"
    own = [sum(us for name, us in work.items() if re.search(one, name)) for one in names]
    launch, tensors, tuples = (us / sum(work.values()) for us in own)
    assert 0.09 < launch < 0.12 and 0.23 < tensors < 0.28 and 0.23 < tuples < 0.28
    rungs = COUNTS["256"]["reused_index_buffers"], COUNTS["256"]["triton_append"]
    one, all_of_them = (12 * rung["append_copies_a_layer"] for rung in rungs)
    assert round(one) == 1
    claim("02", r"reduce the (\d+) index copies to one", all_of_them)


def test_full_batch_gains_where_prompts_are_equal():
    nb, promised = pair_of("full_batch"), predicted("02", 2)["W3"]
    said(
        prose("02"),
        "W3's steps get shorter by about what was predicted, and no other workload gains. There, every eng",
    )
    assert abs(step_saved(nb, "W3") / promised - 1) < 0.4 and {*faster("full_batch")} <= {"W3"}
    said(prose("02"), "There, every engine of `full_batch` is faster than every one of `triton_append`")
    assert not overlap(nb, "W3")
    claim("02", r"W2 runs the same code in both rungs; its (\S+) µs", step_saved(nb, "W2"))


def test_identity_pos_gains_where_prompts_are_mixed():
    nb = pair_of("identity_pos")
    said(
        prose("02"),
        "`identity_pos`: W4 changes most for the better, .* more than the noise depends on the host",
    )
    gains = {workload: nb.gain(workload) for workload in signs("identity_pos")}
    assert max(gains, key=gains.get) == "W4" and gains["W4"] > 0 and {*faster("identity_pos")} <= {"W4"}


def test_an_index_tensor_costs_more_than_the_kernel_saves():
    saved = 12 * (append_us("generic", "device_rotating") - append_us("full_batch", "device_rotating"))
    claim("02", r"kernel saves (\d+) µs of GPU time in all 12 layers", saved)
    tensor = step_saved(pair_of("full_batch"), "W3") / 24
    claim(
        "02", r"Making a single index tensor, from list to copy, took (\d+) µs in W3, for 1,024 bytes", tensor
    )
    assert tensor > 3 * saved


# 03


def engines_us(workload: str) -> list[list[float]]:
    """The median step of each engine of the ablation: a list for each variant."""
    turns = RESULTS.figures(f"ablations-{workload}", "pinned_h2d", "turns_us").values()
    return [[sorted(engine)[len(engine) // 2] for engine in variant] for variant in turns]


def test_one_array_saves_more_than_predicted():
    nb, saved = pair_of("pinned_h2d"), step_saved(pair_of("pinned_h2d"), "W3")
    said(
        prose("03"),
        "W3 saves far more than the predicted quarter of its step, and every engine of `pinned_h2d`",
    )
    share = predicted("03")["W3"] / nb.step_us("W3")[0].us
    assert 0.2 < share < 0.3 and saved > 1.5 * predicted("03")["W3"] and not overlap(nb, "W3")
    said(prose("03"), "than every one of `no_mask`. W2's engines overlap")
    assert overlap(nb, "W2")


def test_the_array_gains_and_pinning_does_not():
    many, lists, array, _ = engines_us("W3")
    said(prose("03"), "leaves the step where it was; an array .* takes off 40 % or more on every engine")
    assert all(abs(two / one - 1) < 0.05 for one, two in zip(many, lists, strict=True))
    assert all(two < 0.6 * one for one, two in zip(lists, array, strict=True))
    said(
        prose("03"),
        "at all four batch sizes its median step takes longer .* though the times of their engines overlap",
    )
    for array, pinned in (engines_us(workload)[2:] for workload in ("W0", "W1", "W2", "W3")):
        assert median(array) < median(pinned) and min(pinned) < max(array)
    said(prose("03"), "At batch 64, each variant's times overlap with those of the variant above")
    small = engines_us("W2")
    assert all(min(one) < max(two) for one, two in zip(small, small[1:], strict=False))
    said(prose("03"), "With up to eight sequences, no whole run differs beyond the noise")
    assert not {"W0", "W1", "W5"} & {*faster("pinned_h2d")}


def test_what_the_ablation_shows_at_w1_is_said_to_be_unexplained():
    said(prose("03"), "two of three engines get faster with one buffer, and slower again when it is pinned")
    many, lists, array, pinned = engines_us("W1")
    assert [sum(us < 0.85 * min(many) for us in one) for one in (lists, array, pinned)] == [2, 2, 0]


def test_what_is_left_of_the_ranges_of_tables_is_recorded():
    old, new = (COUNTS["256"][rung]["range_us"] for rung in ("no_mask", "pinned_h2d"))
    copies = "h2d_block_tables"
    said(prose("03"), f"The range `{copies}` lost even more than the predicted eleven twelfths")
    assert new[copies] < old[copies] / 12
    claim("03", r"Pinning had little to hide: (\S+) ms of that range is left", new[copies] / 1e3)


# 04


LAUNCHES = RESULTS.figures("autotune", "launches")


def slower(launch: dict, choice: list[int]) -> float:
    """By how much a choice of warps and stages is slower than the fixed one, on the device."""
    return launch["device_us"]["{} warps, {} stages".format(*choice)] / launch["default_device_us"] - 1


def test_the_tuner_wins_on_the_device_and_no_workload_gains():
    said(prose("04"), "choice wins in all four shapes. No workload gains, and in whole runs some lose")
    lost = [-100 * pair_of("autotune").gain(w) for w, sign in signs("autotune").items() if sign < 0]
    claim("04", r"some lose: W3 and W5, by (\d+) to (\d+) %", min(lost), max(lost))
    assert [w for w, sign in signs("autotune").items() if sign < 0] == ["W3", "W5"]
    assert [slower(one, one["chosen"]) < 0 for one in LAUNCHES] == 4 * [True]
    assert max(signs("autotune").values()) <= 0 and signs("autotune")
    said(prose("04"), "at 256 × 64 the kernel takes over a quarter less time, and no run gets faster")
    last = LAUNCHES[-1]
    assert (last["batch"], last["context"]) == (256, 64) and slower(last, last["chosen"]) < -0.25


def test_stages_change_nothing():
    said(prose("04"), "4/2, 4/4 and the fixed 4/3 take the same time")
    assert paged_attention.FIXED_NUM_WARPS == 4 and paged_attention.FIXED_NUM_STAGES == 3
    assert all(abs(slower(one, [4, stages])) < 0.01 for one in LAUNCHES for stages in (2, 4))


def test_no_configuration_beats_the_fixed_one_at_every_shape():
    said(prose("04"), "None does: 2 warps, the best in the three larger shapes, lose a little at 8 × 128")
    early, *larger = LAUNCHES
    assert (early["batch"], early["context"]) == (8, 128) and 0 < slower(early, [2, 2]) < 0.03
    assert [one["chosen"] for one in larger] == [[2, 2]] * 3
    assert all(max(slower(one, choice) for one in LAUNCHES) > 0 for choice in ([4, 2], [4, 4], [8, 2]))


def test_a_choice_for_8_sequences_is_slow_for_more():
    (least,) = said(prose("04"), r"Tuned with 8 sequences, the kernel takes at least (\d+) % longer")
    early, *larger = LAUNCHES
    claim("04", r"the tuner takes (\d+) warps and (\d+) stages", *early["chosen"])
    assert early["batch"] == 8 < min(one["batch"] for one in larger)
    assert 0 < min(slower(one, early["chosen"]) for one in larger) - number(least) / 100 < 0.05


def test_steps_cannot_show_what_lookups_cost():
    nb, promised = pair_of("autotune"), predicted("04")
    said(prose("04"), "about 0.1 ms of the host's time in every step")
    assert all(90 < -us < 115 for us in promised.values())
    said(prose("04"), "in all three workloads, the range over engines includes 0")
    assert [overlap(nb, workload) for workload in promised] == 3 * [True]


# 05


def test_a_graph_pays_most_where_a_step_is_short():
    nb, promised = pair_of("cuda_graph"), predicted("05")
    saved = {workload: step_saved(nb, workload) for workload in promised}
    words = r"It takes (\S+) to (\S+) ms from a step of 8, 64 or 256 sequences"
    claim("05", words, min(saved.values()) / 1e3, max(saved.values()) / 1e3)
    said(prose("05"), "more than half of it at 8, about a third at 256")
    w0, w1, w2, w3 = (step_saved(nb, one) / nb.step_us(one)[0].us for one in ("W0", "W1", "W2", "W3"))
    assert w1 > 0.5 and 0.28 < w3 < 0.4
    said(prose("05"), "at every batch size, most at small ones")
    assert min(w0, w1) > w2 > w3
    said(prose("05"), "The prediction is within a quarter of what timed steps save")
    assert all(abs(promised[workload] / us - 1) < 0.25 for workload, us in saved.items())
    said(prose("05"), "`kv_append`, which this rung does not touch, takes longer")
    for batch in ("8", "64", "256"):
        (row,) = re.findall(rf"^ *{batch} +([\d,]+) +([\d,]+) +([\d.]+)$", stored("05"), re.MULTILINE)
        old, new, host = map(number, row)
        assert new > 1.1 * host * old


# 09


def test_slots_gain_where_rows_are_many_and_reserve_saves_what_was_predicted():
    nb, promised = pair_of("mutable_block_info"), predicted("09")
    said(prose("09"), "makes the largest batch over a fifth faster, and `reserve` gets shorter by what was")
    most = max(map(nb.gain, ("W0", "W1", "W2", "W3")))
    assert signs(nb.after)["W3"] == 1 and 0.2 < nb.gain("W3") == most
    said(prose("09"), "shorter by what was predicted, to within 25 %, at all three batch sizes")
    for us, batch in zip(promised.values(), BATCHES, strict=True):
        old, new = (one["host: reserve"] for one in causes_us(nb, batch))
        assert abs((old - new) / us - 1) < 0.25


def test_slots_and_one_table_save_at_least_what_was_predicted():
    rungs = "mutable_block_info", "resident_tables", "one_table"
    said(prose("09"), "so expect an underestimate")
    said(prose("09"), "`one_table` saves more than predicted at every batch size, as expected")
    one_table = pair_of("one_table")
    assert all(step_saved(one_table, name) > us for name, us in predicted("09", 2).items())
    said(prose("09"), "and `mutable_block_info` about as much or more at 256 sequences")
    assert step_saved(pair_of("mutable_block_info"), "W3") > 0.9 * predicted("09", 0)["W3"]
    times = []
    for nb in map(pair_of, rungs):
        times += [one.us / us for one, us in zip(nb.step_us("W3"), nb.whole_run_us("W3"), strict=True)]
    claim("09", r"they take (\S+) to (\S+) times what whole runs imply", min(times), max(times))
