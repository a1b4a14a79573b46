"""The notebooks of weights, keys and values of fewer bits: their text says what records and bytes say."""

from __future__ import annotations

from rosellm.lab.records.records import find
from rosellm.models.quantized import WEIGHT_FORMS
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.layers.fused import FEW_ROWS, FINE_ROWS
from tests.claims.reading import claim

formats = load_exhibit("formats")
H200, CPU = find(), find("cpu")
FIGURE = r"(\d+(?:\.\d+)?)"


def gain(model: str, workload: str, form: str = "fp8") -> float:
    return dict(zip(WEIGHT_FORMS, formats.gains(H200, model, workload), strict=True))[form]


def test_gains_and_promises_are_what_is_said():
    large = [gain("Llama-3.1-8B", load) for load in formats.DECODED]
    assert round(large[0], 2) == round(large[1], 2)
    words = rf"is {FIGURE} times as fast with one and with eight sequences, {FIGURE} times with 64"
    claim("40", words, large[0], large[2])
    promised = [formats.promised("Llama-3.1-8B", load) for load in formats.DECODED]
    claim("40", rf"with 64; the bytes promise {FIGURE}, {FIGURE} and {FIGURE}\.", *promised)
    claim("40", rf"Llama-3.2-1B is {FIGURE} times as fast, and Qwen3", gain("Llama-3.2-1B", "D1"))
    claim("40", rf"Qwen3-0.6B is slower: {FIGURE} times", gain("Qwen3-0.6B", "D1"))
    small = [gain("Llama-3.1-8B", load, "int4") for load in formats.DECODED]
    promised = [formats.promised("Llama-3.1-8B", load, "int4") for load in formats.DECODED]
    words = rf"is {FIGURE}, {FIGURE} and {FIGURE} times as fast; the bytes promise {FIGURE}, {FIGURE} and"
    claim("40", rf"{words} {FIGURE}\.", *small, *promised)
    prompts = [gain("Llama-3.1-8B", "PRE", form) for form in ("fp8", "int8")]
    claim("40", rf"Prompts are read {FIGURE} times as fast in .*? and {FIGURE} times with int8", *prompts)


def test_the_price_is_what_is_said():
    quality = CPU.figures("formats-rose-tiny", "quality", "formats")
    perplexities = [quality[form]["perplexity"] for form in ("fp8", "int8", "none")]
    claim("40", rf"a perplexity of {FIGURE} \(fp8\) or {FIGURE} \(int8\) instead of {FIGURE}", *perplexities)
    coarse = [quality[f"{form}, activations of 1 digit"]["perplexity"] for form in ("fp8", "int8")]
    claim("40", rf"and of {FIGURE} or {FIGURE} with one code per activation", *coarse)
    four = [quality[form]["perplexity"] for form in ("int4", "int4, calibrated")]
    claim("40", rf"have a price: {FIGURE}, or {FIGURE} if they are calibrated", *four)
    assert 6.5 < quality["fp8"]["kl"] / quality["int8"]["kl"] < 7.5  # a seventh
    claim("40", rf"in steps of up to {FIGURE} rows \({FIGURE} with weights of 4 bits\)", FINE_ROWS, FEW_ROWS)


def test_runs_with_quantised_keys_and_values_take_what_is_said():
    loads, model = ("L8K", "L32K", "MIX"), "Llama-3.1-8B"
    promised = [formats.promised_with_heads(H200, model, load) for load in loads]
    found = [formats.gain_with_heads(H200, model, load) for load in loads]
    words = rf"are {FIGURE}, {FIGURE} and {FIGURE} times as fast; the bytes promise {FIGURE}, {FIGURE} and"
    claim("41", rf"{words} {FIGURE}\.", *found, *promised)
