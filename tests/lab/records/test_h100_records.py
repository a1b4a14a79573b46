"""What README.md tells of the records of an H100."""

from statistics import median

from rosellm.lab.records import first_request, user_calls
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.model_ladder import GPT2, by_role
from rosellm.lab.records.records import Results, find
from rosellm.lab.records.versions import NEW, OLD

RESULTS = find("nvidia-h100-80gb-hbm3")


def test_all_are_of_the_same_gpu():
    assert {RESULTS.load(name)["environment"]["device_name"] for name in RESULTS.names()} == {
        "NVIDIA H100 80GB HBM3"
    }


def samples(results: Results, workload: str) -> list[list[float]]:
    """Tokens a second of each side's samples, the earlier engine's first."""
    sides = results.figures("versions", workload)
    return [[one["tok_s"] for one in sides[side]["repeats"]] for side in (OLD, NEW)]


def change(results: Results, workload: str) -> float:
    """Percent between the sides' medians."""
    old, new = map(median, samples(results, workload))
    return 100 * (new / old - 1)


def test_in_turns_with_the_engine_for_gpt2_alone_no_workload_is_slower_beyond_its_samples():
    changes = {name: round(change(RESULTS, name)) for name in RESULTS.load("versions")["figures"]}
    assert changes == {"W0": 17, "W1": 5, "W2": -2, "W3": 8, "W4": 12, "W5": 11, "W6": 3, "W7": 5}
    old, new = samples(RESULTS, "W2")
    assert max(new) > min(old)
    spreads = [(max(side) - min(side)) / median(side) for w in ("W3", "W4") for side in samples(RESULTS, w)]
    assert 0.15 < max(spreads) < 0.2


def test_first_tokens_come_as_much_sooner_as_readme_tells():
    models = [Results(RESULTS.folder / name) for name in ("Qwen3-0.6B", "Llama-3.2-1B")]
    assert [round(change(one, "TTFT64")) for one in models] == [5, 3]
    assert all(abs(change(one, "TTFT1K")) < 1 for one in models)
    assert all(abs(change(one, "D1")) < 0.2 for one in models)
    hosts = [
        1e3 / median(samples(one, name)[1]) - one.figures("ledgers", name, "step_us") / 1e3
        for one in models
        for name in ("TTFT64", "TTFT1K")
    ]
    assert (round(min(hosts), 1), round(max(hosts), 1)) == (0.4, 0.7)


def test_prefills_are_mostly_products_as_readme_tells():
    shapes = ("1x64", "1x512", "4x256")
    ledgers = {shape: Ledger.from_dict(RESULTS.figures("ledger_prefills", shape)) for shape in shapes}
    assert not any(one.is_disturbed for one in ledgers.values())
    roles = {shape: by_role(one) for shape, one in ledgers.items()}
    products = [(round(one["GEMM"].us), round(one["GEMM"].floor_us)) for one in roles.values()]
    assert products == [(182, 61), (341, 117), (448, 233)]
    assert round(roles["1x64"]["norm"].us) == 49 and round(roles["1x512"]["attention"].us) == 117
    assert all(2 * one["GEMM"].us > ledgers[shape].step_us for shape, one in roles.items())


def test_a_full_step_of_w8_is_accounted_for():
    ledger = Ledger.from_dict(RESULTS.figures("ledger_w8", "W8"))
    roles = by_role(ledger)
    assert ledger.batch == 256 and not ledger.is_disturbed
    assert (round(ledger.step_us), round(ledger.floor_us)) == (1676, 1333)
    above = [round(roles[role].us - roles[role].floor_us) for role in ("GEMM", "attention")]
    assert above == [197, 82]


def test_drawing_makes_the_head_slower_and_filters_add_a_kernel_as_notebook_31_tells():
    recorded = RESULTS.figures("ledger_w8").values()
    w8, w9, w10 = ({row["cause"]: row for row in figures["rows"]} for figures in recorded)
    assert w9["head"]["us"] > 1.5 * w8["head"]["us"] and w10["head"]["us"] > 1.4 * w8["head"]["us"]
    assert [one["sampling"]["launches"] for one in (w8, w9, w10)] == [1, 1, 2]
    assert w10["sampling"]["us"] - w8["sampling"]["us"] > 25


def test_bytes_alone_keep_a_step_of_64_rows_with_500_tokens_from_its_aim():
    recorded = RESULTS.load("step-64x500")["figures"]
    turns = [us for turn in recorded["turns_us"]["split_kv"] for us in turn]
    assert round(median(turns)) == 730
    attention = by_role(Ledger.from_dict(RESULTS.figures("ledger_w8", "W8")))["attention"]
    kv_bytes = 256 * RESULTS.figures("ledger_w8", "W8", "context") * GPT2.kv_bytes_per_token(2)
    best = kv_bytes / attention.floor_us
    needed = 64 * 500 * GPT2.kv_bytes_per_token(2) + 2 * GPT2.n_parameters
    assert needed / best > recorded["aims_us"]["split_kv"] == 400


def test_prefills_take_what_readme_tells_beside_their_aims():
    figures = RESULTS.load("prefill_times")["figures"]
    medians = {name: float(f"{one['medians']['ms']:.2g}") for name, one in figures["shapes"].items()}
    assert medians == {"1x64": 0.32, "1x512": 0.58, "4x256": 0.68, "16x1000": 6.4}
    assert list(figures["aims_ms"].values()) == [0.30, 0.50, 0.70, 5.0]


def test_one_call_adds_to_an_inbox_of_w6_and_to_others_less_than_repeats_differ():
    recorded = user_calls.recorded(RESULTS)
    found = {name: user_calls.shares(one) for name, one in recorded.items()}
    w6 = found.pop("W6")
    assert [round(w6[way], 2) for way in (user_calls.INBOX, user_calls.ONE_CALL)] == [0.85, 0.91]
    for name, ways in found.items():
        repeats = recorded[name][user_calls.ONE_CALL]["repeats"]
        rates = [one["total_throughput_tok_s"] for one in repeats]
        spread = (max(rates) - min(rates)) / user_calls.rate(recorded[name], user_calls.BENEATH)
        assert abs(ways[user_calls.ONE_CALL] - ways[user_calls.INBOX]) < spread


def test_constructors_and_first_runs_take_what_readme_tells():
    warm = [one for one in first_request.recorded(RESULTS) if one["warm_up"]]
    seconds = {
        cache: sorted(round(first_request.construction_s(one), 1) for one in warm if one["cache"] == cache)
        for cache in first_request.AIMS_S
    }
    assert seconds == {"empty": [16.4, 19.5], "filled": [6.7, 8.5]}
    shares = sorted(map(first_request.run_ratio, warm))
    assert [round(shares[0], 2), round(shares[-1], 2)] == [0.94, 0.96]
