"""The notebooks of weights, keys and values of fewer bits: their text says what records and bytes say."""

from __future__ import annotations

from rosellm.lab.records.records import find, read_us
from rosellm.models.quantized import WEIGHT_FORMS
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS
from rosellm.roseinfer.kernels.ring import MOST_COLUMNS
from tests.claims.reading import claim

formats = load_exhibit("formats")
H200, CPU = find(), find("cpu")
FIGURE = r"(\d+(?:\.\d+)?)"


def gain(model: str, workload: str, form: str = "fp8") -> float:
    return dict(zip(WEIGHT_FORMS, formats.gains(H200, model, workload), strict=True))[form]


def test_gains_and_promises_are_what_is_said():
    large = [gain("Llama-3.1-8B", load) for load in formats.DECODED]
    words = rf"is {FIGURE}, {FIGURE} and {FIGURE} times as fast with one, eight and 64 sequences"
    claim("40", words, *large)
    promised = [formats.promised("Llama-3.1-8B", load) for load in formats.DECODED]
    claim(
        "40",
        rf"with one, eight and 64 sequences; the bytes promise {FIGURE}, {FIGURE} and {FIGURE}\.",
        *promised,
    )
    words = rf"Llama-3.2-1B is {FIGURE} times as fast, and Qwen3-0.6B {FIGURE} times\."
    claim("40", words, *(gain(model, "D1") for model in ("Llama-3.2-1B", "Qwen3-0.6B")))
    small = [gain("Llama-3.1-8B", load, "int4") for load in formats.DECODED]
    promised = [formats.promised("Llama-3.1-8B", load, "int4") for load in formats.DECODED]
    words = rf"is {FIGURE}, {FIGURE} and {FIGURE} times as fast; the bytes promise {FIGURE}, {FIGURE} and"
    claim("40", rf"{words} {FIGURE}\.", *small, *promised)
    prompts = [gain("Llama-3.1-8B", "PRE", form) for form in ("fp8", "int8")]
    claim("40", rf"prefill of Llama-3.1-8B is {FIGURE} times as fast; with int8, {FIGURE} times:", *prompts)


def test_steps_are_as_near_the_line_of_their_bytes_as_is_said_and_pay_up_to_what_is_said():
    steps = formats.equal_steps(H200, "Llama-3.1-8B")
    read = [100 * read_us(H200, 1e9 * gb) / us for gb, us in (steps[form][1] for form in formats.STEPS)]
    words = (
        rf"and 16 bits, reading explains {FIGURE}% of a step, with 8 bits {FIGURE}%, with 4 bits {FIGURE}%"
    )
    claim("40", words, *read)
    assert steps["int4"][256][1] > steps["none"][256][1]
    claim("40", rf"again for every {FIGURE} sequences", MOST_COLUMNS)
    for model in ("Llama-3.1-8B", "Llama-3.2-1B"):
        assert {formats.pays_up_to(H200, model, form) for form in ("fp8", "int8")} == {256}  # never stop
        claim("40", rf"four bits pay up to {FIGURE} sequences", formats.pays_up_to(H200, model, "int4"))


def test_the_price_is_what_is_said():
    quality = CPU.figures("formats-rose-tiny", "quality", "formats")
    perplexities = [quality[form]["perplexity"] for form in ("fp8", "int8", "none")]
    claim("40", rf"a perplexity of {FIGURE} \(fp8\) or {FIGURE} \(int8\) instead of {FIGURE}", *perplexities)
    coarse = [quality[f"{form}, activations of 1 digit"]["perplexity"] for form in ("fp8", "int8")]
    claim("40", rf"and of {FIGURE} or {FIGURE} with one code per activation", *coarse)
    four = [quality[form]["perplexity"] for form in ("int4", "int4, calibrated")]
    claim("40", rf"have a price: {FIGURE}, or {FIGURE} if they are calibrated", *four)
    assert 6.5 < quality["fp8"]["kl"] / quality["int8"]["kl"] < 7.5  # a seventh
    claim("40", rf"in steps of up to {FIGURE} rows", FEW_ROWS)


def test_runs_with_quantised_keys_and_values_take_what_is_said():
    loads, model = ("L8K", "L32K", "MIX"), "Llama-3.1-8B"
    promised = [formats.promised_with_heads(H200, model, load) for load in loads]
    found = [formats.gain_with_heads(H200, model, load) for load in loads]
    words = rf"are {FIGURE}, {FIGURE} and {FIGURE} times as fast \(predicted: {FIGURE}, {FIGURE} and"
    claim("41", rf"{words} {FIGURE}\)", *found, *promised)
    alone = [formats.gain_with_heads(H200, model, load, "kv-fp8") for load in loads]
    claim("41", rf"KV cache alone, runs are {FIGURE}, {FIGURE} and {FIGURE} times as fast", *alone)
    assert all(
        2 * (one - 1) < both - 1 for one, both in zip(alone, found, strict=True)
    )  # most is the weights'
