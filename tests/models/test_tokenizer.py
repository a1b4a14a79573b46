"""Tokenizers: what is learnt, stored, refused, and decoded piece by piece."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import example, given, strategies as st
from tokenizers import decoders, models

from rosellm.errors import CheckpointError
from rosellm.models import tokenizer as module
from rosellm.models.families.table import FAMILIES, write_arch
from rosellm.models.tokenizer import END_OF_TEXT, ByteStream, DecoderStream, Tokenizer, load_tokenizer
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import small_config
from tests.models import family_checks as checks
from tests.models.family_checks import sizes

CODE = '''class Queue:
    """A queue — first in, first out."""

    def put_item(self, item):
        with self.lock:
            self.items.append(item)

    def get_item(self):
        with self.lock:
            return self.items.pop(0)
'''
SAMPLE = "def f(x):\n        return x.real  # naïve ✓ 🌹\n\n\n\tassert 12345 != '''\r\n'''\n"
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([CODE] * 3, vocab_size=320)


@pytest.fixture
def saved(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(tmp_path)
    return tmp_path


def refused(folder: Path, words: str) -> None:
    checks.refused(CheckpointError, (words,), load_tokenizer, folder, small_config(vocab_size=320))


@given(text=st.text(max_size=60).filter(lambda text: END_OF_TEXT not in text))
def test_every_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_appears_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("🌹")
    assert [stream.push(token_id) for token_id in ids] == ["", "", "", "🌹"]


@pytest.mark.parametrize("byte_level", [True, False], ids=["looked up", "the library's decoder"])
@given(ids=st.lists(st.integers(0, 330), max_size=30))  # special, every byte, words, unknown
def test_a_finished_stream_has_given_the_decoded_text(tokenizer: Tokenizer, ids, byte_level) -> None:
    stream = tokenizer.stream() if byte_level else DecoderStream(tokenizer._raw, [], True)
    streamed = "".join(stream.push(token_id) for token_id in ids)
    text = streamed + stream.finish()
    assert not byte_level or set(text[len(streamed) :]) <= {REPLACEMENT}
    assert text == tokenizer.decode(ids) == tokenizer._raw.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As of Llama 2 and Mistral: tokens 0 to 255 are bytes, others words."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "▁b": 257, "c": 258}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(list(parts))
    return Tokenizer(raw, None)


WORD_OR_CHARACTER = st.one_of(
    st.just([256]), st.just([258]), st.characters(codec="utf-8").map(lambda c: list(c.encode()))
)


@given(parts=st.lists(WORD_OR_CHARACTER, max_size=12))
def test_bytes_of_whole_characters_stream_to_the_decoded_text(byte_fallback: Tokenizer, parts) -> None:
    ids, stream = list(chain.from_iterable(parts)), byte_fallback.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == byte_fallback.decode(ids)


@given(ids=st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xF0, 0x9F, 256, 257, 258]), max_size=30))
@example(ids=[0x41, 0x80, 257])
def test_bytes_that_are_no_text_end_no_stream(byte_fallback: Tokenizer, ids) -> None:
    stream = byte_fallback.stream()
    told = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
    assert len(told) >= len(byte_fallback.decode(ids))


def test_an_added_token_beyond_the_byte_alphabet_is_its_own_text() -> None:
    raw = train_tokenizer([CODE], vocab_size=300)._raw
    raw.add_tokens(["<π>", "<a b>"])
    tokenizer = Tokenizer(raw, None)
    ids = tokenizer.encode("x<π><a b>y")
    stream = tokenizer.stream()
    assert len(ids) == 4 and [stream.push(token_id) for token_id in ids] == ["x", "<π>", "<a b>", "y"]


MERGES, VOCABULARY = "merges.txt", "vocab.json"


@pytest.fixture
def in_parts(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """GPT-2's own layout: vocab.json and merges.txt, and no tokenizer.json."""
    model = json.loads(tokenizer._raw.to_str())["model"]
    (tmp_path / "config.json").write_text(json.dumps(write_arch(small_config(vocab_size=320))))
    (tmp_path / VOCABULARY).write_text(json.dumps(model["vocab"]))
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    (tmp_path / MERGES).write_text("\n".join(["#version: 0.2", *merges, ""]))
    return tmp_path


def test_vocabulary_and_merges_load_as_gpt2s_tokenizer(in_parts: Path) -> None:
    ours = load_tokenizer(in_parts, small_config(vocab_size=320))
    theirs = transformers.GPT2Tokenizer(str(in_parts / VOCABULARY), str(in_parts / MERGES))
    assert ours.encode(SAMPLE + END_OF_TEXT) == theirs.encode(SAMPLE + END_OF_TEXT)
    assert ours.vocab_size == 320 and ours.eos_token_id == 0
    stream = ours.stream()
    assert isinstance(stream, ByteStream)
    assert "".join(stream.push(token_id) for token_id in [*ours.encode(SAMPLE), 0]) == SAMPLE


def test_a_tokenizers_remote_code_is_not_run(in_parts: Path) -> None:
    fields = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
    (in_parts / "tokenizer_config.json").write_text(json.dumps(fields))
    (in_parts / "trap.py").write_text(f"open({str(in_parts / 'sprung')!r}, 'w')\nclass Trap: ...\n")
    refused(in_parts, "has no tokenizer.json")
    assert not (in_parts / "sprung").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path, family) -> None:
    refused(tmp_path, "has no tokenizer.json, and")
    (tmp_path / "config.json").write_text(json.dumps(sizes(family) | {"model_type": family}))
    named = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"6": {"content": "<tool_call>"}}}
    (tmp_path / CONFIG).write_text(json.dumps(named))
    refused(tmp_path, "has no tokenizer.json, and")


NAMED, CONFIG = "<|im_end|>", "tokenizer_config.json"
WAYS_TO_NAME = {
    "decoder": (CONFIG, {"added_tokens_decoder": {"300": {"content": NAMED, "special": True}}}),
    "list": (CONFIG, {"additional_special_tokens": [NAMED]}),
    "end": (CONFIG, {"eos_token": {"__type": "AddedToken", "content": NAMED}}),
    "added": ("added_tokens.json", {NAMED: 300}),
    "map": ("special_tokens_map.json", {"eos_token": NAMED}),
}


@pytest.mark.parametrize("listed", [False, True], ids=["missing", "listed"])
@pytest.mark.parametrize("name, told", WAYS_TO_NAME.values(), ids=WAYS_TO_NAME)
def test_a_token_that_another_file_names_is_one_token_as_in_transformers(
    tmp_path: Path, name: str, told: dict, listed: bool
) -> None:
    raw = train_tokenizer([CODE] * 3, vocab_size=300)._raw
    if listed:
        raw.add_tokens([NAMED])
    raw.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(told if name != CONFIG else config | told))
    tokenizer = load_tokenizer(tmp_path, small_config(vocab_size=320))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(f"a{NAMED}b", add_special_tokens=False).input_ids
    assert tokenizer.encode(f"a{NAMED}b") == ids and len(ids) == 3
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("content", ["[]", "{", '{"added_tokens_decoder": [1]}', '{"eos_token": 5}'])
def test_named_tokens_in_no_known_form_are_refused_in_one_line(saved: Path, content: str) -> None:
    (saved / CONFIG).write_text(content)
    refused(saved, "cannot be read as a tokenizer")


def test_equal_texts_are_encoded_once_and_each_gets_a_list_of_its_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, encode, encoded = tokenizer.encode(SAMPLE), tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda *given: encoded.append(given) or encode(*given))
    first, second = tokenizer.encode_many([SAMPLE, SAMPLE])
    assert first == second == expected and first is not second and len(encoded) == 1


@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 50257])
def test_a_dummy_encodes_decodes_and_streams_within_its_models_vocabulary(vocab_size: int) -> None:
    dummy = module.load_dummy_tokenizer(small_config(vocab_size=vocab_size))
    texts = [SAMPLE, CODE]
    assert dummy.encode_many(texts) == [dummy.encode(text) for text in texts]
    ids = [*dummy.encode(SAMPLE), *(i for i in (50256, 4096, 4097) if i < vocab_size), *dummy.encode(CODE)]
    assert all(0 <= token_id < vocab_size for token_id in ids)
    stream = dummy.stream()
    streamed = "".join(stream.push(token_id) for token_id in ids)
    assert stream.finish() == "" and dummy.decode(ids) == streamed
    assert streamed.endswith(CODE) or vocab_size < 256


def test_training_makes_tokens_of_line_breaks_with_indentation_and_of_names(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (320, 0)
    for text in (END_OF_TEXT, "\n    ", "\n            ", "\n\n    ", "_item"):
        assert len(tokenizer.encode(text)) == 1
    again = train_tokenizer([CODE] * 3, vocab_size=320)
    assert again.encode(CODE + SAMPLE) == tokenizer.encode(CODE + SAMPLE)
    assert train_tokenizer(["a b"], vocab_size=1000).vocab_size < 300


def test_a_saved_tokenizer_loads_with_the_same_ids_here_and_in_transformers(
    saved: Path, tokenizer: Tokenizer
) -> None:
    (saved / "config.json").write_text(json.dumps(write_arch(small_config(vocab_size=320))))
    ours = load_tokenizer(saved, small_config(vocab_size=320))
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    assert ours.encode(SAMPLE) == theirs.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert ours.eos_token_id == theirs.eos_token_id == 0 and ours.folder == saved


def test_the_end_of_text_is_the_tokenizers_own_or_else_the_models(saved: Path) -> None:
    config = small_config(vocab_size=320, eos_token_ids=(7,))
    assert load_tokenizer(saved, config).eos_token_id == 0
    (saved / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert load_tokenizer(saved, config).eos_token_id == 7


CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 1}
PADDED = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 7}
PADDED |= {"pad_type_id": 0, "pad_token": "x"}


@pytest.mark.parametrize("change", [{"truncation": CUT}, {"padding": PADDED}], ids=str)
def test_a_tokenizer_cuts_and_pads_no_prompt_whatever_its_file_says(saved, tokenizer, change) -> None:
    path = saved / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert load_tokenizer(saved, small_config(vocab_size=320)).encode(CODE) == tokenizer.encode(CODE)
