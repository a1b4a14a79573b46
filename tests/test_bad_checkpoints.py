"""A checkpoint that is spoilt is refused in one line, and another engine serves on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosellm import LLM
from rosellm.errors import CheckpointError, PromptError
from rosellm.models.tokenizer import load_tokenizer
from tests.test_bad_input import (  # noqa: F401
    GREEDY,
    HUGE,
    INDEX,
    SHAPE,
    WEIGHTS,
    WORDS,
    WPE,
    Row,
    check,
    checkpoint,
    folder,
    llm,
    loaded,
    modern_checkpoint,
    row,
    serving,
    tokens,
)


def spoilt(change: Callable[[Path], object], **options: object) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        change(folder)
        loaded(folder, **options)

    return run


def tensors(change: Callable[[dict[str, torch.Tensor]], object], **options: object):
    """Load after ``change`` of the tensors."""

    def run(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS)

    return spoilt(run, **options)


def edited(name: str, change: Callable[[dict[str, Any]], object], **options: object):
    """Load after ``change`` of a JSON file."""

    def run(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return spoilt(run, **options)


def written(name: str, content: str | bytes, **options: object) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return spoilt(lambda folder: (folder / name).write_bytes(data), **options)


def config(**fields: object) -> Callable[[Path], object]:
    return edited("config.json", lambda value: value.update(fields))


def index(shard: str) -> Callable[[Path], object]:
    return indexed(json.dumps({"weight_map": {WPE: shard}}))


def indexed(text: str) -> Callable[[Path], object]:
    """Weights by an index alone; beside a single file none is read."""

    def run(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text)

    return spoilt(run)


def pickled(folder: Path) -> None:
    torch.save({WPE: torch.zeros(64, 32)}, folder / WEIGHTS)


FILES = [
    row(spoilt(lambda f: os.truncate(f / WEIGHTS, 5000)), CheckpointError, WEIGHTS, "cannot be read"),
    row(spoilt(pickled), CheckpointError, WEIGHTS, "cannot be read as safetensors"),
    row(spoilt(lambda f: (f / WEIGHTS).unlink()), CheckpointError, "lacks 'model.safetensors'", "only"),
    row(tensors(lambda t: t.pop(WPE)), CheckpointError, "lacks 1 tensors", WPE),
    row(tensors(lambda t: t.update({WPE: t[WPE][:-1]})), CheckpointError, WPE, "[63, 32]", "[64, 32]"),
    row(tensors(lambda t: t[WPE].fill_(torch.nan)), CheckpointError, WPE, "not finite in float32"),
    row(tensors(lambda t: t[WPE].fill_(1e6), dtype="float16"), CheckpointError, WPE, "not finite in float16"),
    row(tensors(lambda t: t.update({WPE: t[WPE].int()})), CheckpointError, WPE, "int32", "use float32"),
    row(index("gone.safetensors"), CheckpointError, "lacks 'gone.safetensors'"),
    row(index("../spoilt/model.safetensors"), CheckpointError, "lacks '../spoilt/model.safetensors'"),
    row(index("config.json"), CheckpointError, "config.json cannot be read as safetensors"),
    row(indexed("[" * 100_000), CheckpointError, INDEX, "not a valid safetensors index"),
    row(spoilt(lambda f: (f / "config.json").unlink()), CheckpointError, "has no config.json"),
    row(written("config.json", "[" * 100_000), CheckpointError, "config.json cannot be read as JSON"),
    row(written("config.json", "[]"), CheckpointError, "config.json", "JSON object"),
    row(config(n_layer=10**9), CheckpointError, "n_layers is 1000000000", "from 1 to 4096"),
    row(config(n_layer=4096), CheckpointError, "parameters", "bytes of safetensors"),
    row(config(vocab_size=HUGE), CheckpointError, f"vocab_size is {HUGE}", "from 1 to 2147483647"),
    row(config(n_embd=-32), CheckpointError, "d_model is -32", "whole number from 1"),
    row(config(n_head=5), CheckpointError, "32 is not a multiple of n_heads 5"),
    row(config(n_inner="128"), CheckpointError, "d_ff is '128'", "whole number from 1"),
    row(config(n_inner=64), CheckpointError, "c_fc.weight", "[32, 128]", "[32, 64]"),
    row(config(layer_norm_epsilon=float("nan")), CheckpointError, "norm_eps is nan", "at most 1"),
    row(config(layer_norm_epsilon=10**400), CheckpointError, "norm_eps is an integer of 1329", "at most 1"),
    row(config(eos_token_id=10**12), CheckpointError, "eos_token_id is 1000000000000", "2147483647"),
    row(config(eos_token_id=[0, True]), CheckpointError, "eos_token_id is True", "token id (0 to"),
    row(config(torch_dtype="int4"), CheckpointError, "dtype 'int4' is not supported", "bfloat16"),
    row(config(quantization_config={"bits": 4}), CheckpointError, "is quantised"),
    row(config(n_embd=None), CheckpointError, "config.json lacks n_embd"),
    row(config(activation_function=["gelu"]), CheckpointError, "['gelu']", "only 'gelu_new'"),
    row(config(reorder_and_upcast_attn="no"), CheckpointError, "'no'", "only False is"),
    row(config(model_type={}), CheckpointError, "model_type {} is not supported; gpt2, llama"),
    row(config(model_type="llama"), CheckpointError, "config.json lacks max_position", "num_hidden_layers"),
]  # fmt: skip


def dummy(**fields: object) -> Callable[[Path], object]:
    return edited("config.json", lambda value: value.update(fields), load_format="dummy")


DUMMIES = [row(dummy(n_embd=2**30), CheckpointError, "parameters in float32 take", "'cpu' has")]


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return edited("tokenizer.json", change)


def answered(change: Callable[[dict[str, Any]], object], text: str) -> Callable[[Path], object]:
    """The file is a tokenizer; the fault shows with a text."""

    def run(folder: Path) -> None:
        path = folder / "tokenizer.json"
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
        llm = loaded(folder)
        try:
            llm.generate([[1], text], GREEDY, use_tqdm=False)
        finally:
            assert len(llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6

    return run


WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
PREPEND_NOTHING = {"type": "Prepend", "prepend": ""}
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}

TOKENIZERS = [
    row(spoilt(lambda f: (f / "tokenizer.json").unlink()), CheckpointError, "has no tokenizer.json"),
    row(spoilt(lambda f: os.truncate(f / "tokenizer.json", 900)), CheckpointError, "as a tokenizer: "),
    row(tokenizer(lambda t: t["model"]["vocab"].update(x=-5)), CheckpointError, "`-5`", "expected u32"),
    row(tokenizer(lambda t: t["model"]["vocab"].update(zz=2**32 - 1)), CheckpointError, "4294967295", "300"),
    row(tokenizer(lambda t: t["model"].pop("merges")), CheckpointError, "Missing vocab/merges"),
    row(tokenizer(lambda t: t["model"]["merges"].append(["q", "zzz"])), CheckpointError, "`zzz` out of voc"),
    row(tokenizer(lambda t: t["model"].update(continuing_subword_prefix="##")), CheckpointError, "slice"),
    row(tokenizer(lambda t: t.update(normalizer=PRECOMPILED)), CheckpointError, "precompiled_charsmap"),
    row(
        tokenizer(lambda t: t["model"]["vocab"].update({f"z{i}": 290 + i for i in range(11)})),
        CheckpointError, "ids up to 300", "embeddings for 300",
    ),
    row(answered(lambda t: t.update(model=WORD_LEVEL), "hello"), PromptError, "'hello'", "Missing [UNK]"),
    row(answered(lambda t: t.update(normalizer=PREPEND_NOTHING), "hello"), PromptError, "'hello'", "index"),
]  # fmt: skip


@pytest.mark.parametrize("one", [*FILES, *DUMMIES, *TOKENIZERS])
@pytest.mark.parametrize("llm", [None], ids=["best"], indirect=True)
def test_a_bad_checkpoint_is_refused_and_another_engine_serves_on(
    one: Row, serving: LLM, folder: Path
) -> None:
    check(one, folder)


CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 1}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 7, "pad_type_id": 0, "pad_token": "x"}
PADDED = {"strategy": {"Fixed": 50}, **PADDING}


@pytest.mark.parametrize("change", [{"truncation": CUT}, {"padding": PADDED}], ids=str)
def test_a_tokenizer_cuts_and_pads_no_prompt_whatever_its_file_says(folder: Path, change: dict) -> None:
    before = load_tokenizer(folder, SHAPE).encode(WORDS)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert load_tokenizer(folder, SHAPE).encode(WORDS) == before
