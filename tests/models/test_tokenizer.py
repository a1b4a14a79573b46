"""Tokenizers: what is learnt, stored, refused, and decoded piece by piece."""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import transformers
from hypothesis import example, given, strategies as st
from tokenizers import decoders, models, processors

from rosellm.errors import CheckpointError, PromptError
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder
from rosellm.models.families.table import FAMILIES, KNOWN_SHAPES, write_arch
from rosellm.models.tokenizer import (
    END_OF_TEXT,
    ByteStream,
    DecoderStream,
    Tokenizer,
    load_dummy_tokenizer,
    load_tokenizer,
)
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import small_config
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
SHIPPED_IDS = [291, 297, 8, 88, 280, 277, 389, 646]  # of "def f(x):", a line break, "    return x"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([CODE] * 3, vocab_size=320)


@pytest.fixture
def saved(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return load_dummy_tokenizer(small_config(vocab_size=4096))


@given(text=st.text(max_size=60).filter(lambda text: END_OF_TEXT not in text))
def test_every_text_survives_encoding_and_decoding(shipped: Tokenizer, text: str) -> None:
    assert shipped.decode(shipped.encode(text)) == text


def test_training_gives_the_asked_vocabulary_with_end_of_text_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 320
    assert tokenizer.eos_token_id == 0
    assert tokenizer.encode(END_OF_TEXT) == [0]


def test_a_vocabulary_that_the_text_cannot_fill_stays_smaller() -> None:
    assert train_tokenizer(["a b"], vocab_size=1000).vocab_size < 300


def test_a_line_break_and_its_indentation_are_one_token(tokenizer: Tokenizer) -> None:
    for indentation in ("\n    ", "\n        ", "\n            ", "\n\n    "):
        assert len(tokenizer.encode(indentation)) == 1


def test_a_name_with_underscores_can_be_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("_item")) == 1
    assert tokenizer.decode(tokenizer.encode(" get_item")) == " get_item"


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    again = train_tokenizer([CODE] * 3, vocab_size=320)
    assert again.encode(CODE + SAMPLE) == tokenizer.encode(CODE + SAMPLE)


def test_many_texts_are_encoded_as_one_by_one(tokenizer: Tokenizer) -> None:
    texts = [CODE, SAMPLE, ""]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


def test_equal_texts_are_encoded_once_to_lists_of_their_own(tokenizer: Tokenizer) -> None:
    told: list[list[str]] = []

    def encode_batch_fast(texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        told.append(texts)
        return tokenizer._raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    spied = Tokenizer(tokenizer._raw, None)
    spied._raw = SimpleNamespace(encode_batch_fast=encode_batch_fast)
    first, other, second = spied.encode_many([CODE, SAMPLE, CODE])
    assert told == [[CODE, SAMPLE]]
    assert (first, other) == (tokenizer.encode(CODE), tokenizer.encode(SAMPLE))
    assert second == first and second is not first


def test_special_tokens_leave_no_trace_in_text(tokenizer: Tokenizer) -> None:
    ids = [0, *tokenizer.encode("self"), 0]
    stream = tokenizer.stream()
    assert tokenizer.decode(ids) == "self"
    assert "".join(stream.push(token_id) for token_id in ids) == "self"


def test_streamed_pieces_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert "".join(stream.push(token_id) for token_id in tokenizer.encode(SAMPLE)) == SAMPLE


def test_a_character_appears_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("🌹")
    assert [stream.push(token_id) for token_id in ids] == ["", "", "", "🌹"]


@pytest.mark.parametrize("seed", range(30))
def test_streaming_any_ids_gives_the_decoded_text_up_to_an_unfinished_character(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
    stream = tokenizer.stream()
    streamed = "".join(stream.push(token_id) for token_id in ids)
    text = tokenizer.decode(ids)
    assert text.startswith(streamed)
    assert set(text[len(streamed) :]) <= {REPLACEMENT}


@pytest.mark.parametrize("byte_level", [True, False], ids=["looked up", "the library's decoder"])
@given(ids=st.lists(st.integers(0, 330), max_size=30))  # special, every byte, words, unknown
def test_a_finished_stream_has_given_the_decoded_text(tokenizer: Tokenizer, ids, byte_level) -> None:
    stream = tokenizer.stream() if byte_level else DecoderStream(tokenizer._raw)
    pieces = [stream.push(token_id) for token_id in ids]
    text = "".join(pieces) + stream.finish()
    assert text == tokenizer.decode(ids) == tokenizer._raw.decode(ids, skip_special_tokens=True)


def test_a_byte_level_vocabulary_is_looked_up_and_another_is_decoded(tokenizer: Tokenizer) -> None:
    other = train_tokenizer([CODE], vocab_size=300)
    other._raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("f", "g")])
    other = Tokenizer(other._raw, None)
    assert isinstance(tokenizer.stream(), ByteStream) and isinstance(other.stream(), DecoderStream)
    stream = other.stream()
    text = "".join(stream.push(token_id) for token_id in other.encode("def f")) + stream.finish()
    assert text == other.decode(other.encode("def f")) == "deg g"


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As of Llama 2 and Mistral: tokens 0 to 255 are bytes, others words."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "▁b": 257, "c": 258}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(list(parts))
    return Tokenizer(raw, None)


WORD_OR_CHARACTER = st.one_of(st.just([256]), st.just([258]), st.characters().map(lambda c: list(c.encode())))


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


def test_streams_of_one_tokenizer_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.stream(), tokenizer.stream()
    rose, tick = tokenizer.encode("🌹"), tokenizer.encode("✓")
    pieces = [first.push(rose[0]), second.push(tick[0]), first.push(rose[1]), second.push(tick[1])]
    assert pieces == [""] * 4
    assert (first.push(rose[2]), second.push(tick[2]), first.push(rose[3])) == ("", "✓", "🌹")


def test_a_saved_tokenizer_loads_with_the_same_ids(saved: Path, tokenizer: Tokenizer) -> None:
    loaded = load_tokenizer(saved, small_config(vocab_size=320))
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert loaded.eos_token_id == 0


@pytest.mark.parametrize("loader", ["PreTrainedTokenizerFast", "AutoTokenizer"])
def test_transformers_reads_a_saved_tokenizer_to_the_same_ids(
    saved: Path, tokenizer: Tokenizer, loader: str
) -> None:
    import transformers

    (saved / "config.json").write_text(json.dumps(write_arch(small_config(vocab_size=320))))
    theirs = getattr(transformers, loader).from_pretrained(saved)
    assert theirs.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert theirs.eos_token_id == 0


def test_a_files_truncation_and_padding_do_not_apply(saved: Path, tokenizer: Tokenizer) -> None:
    raw = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=200)
    raw.save(str(saved / "tokenizer.json"))
    loaded = load_tokenizer(saved, small_config(vocab_size=320))
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert 4 < len(tokenizer.encode(SAMPLE)) < 200


def test_the_configs_end_of_text_outranks_the_tokenizers(saved: Path) -> None:
    assert load_tokenizer(saved, small_config(vocab_size=320, eos_token_ids=(7,))).eos_token_id == 7


def test_a_vocabulary_as_large_as_the_models_fits_and_a_larger_one_is_refused(saved: Path) -> None:
    load_tokenizer(saved, small_config(vocab_size=320))
    with pytest.raises(
        CheckpointError, match="has token ids up to 319; the model has embeddings for 319 tokens$"
    ):
        load_tokenizer(saved, small_config(vocab_size=319))


MERGES, VOCABULARY = "merges.txt", "vocab.json"


@pytest.fixture
def in_parts(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """GPT-2's own layout: vocab.json and merges.txt, and no tokenizer.json."""
    model = json.loads(tokenizer._raw.to_str())["model"]
    (tmp_path / "config.json").write_text(json.dumps(write_arch(small_config(vocab_size=320))))
    (tmp_path / VOCABULARY).write_text(json.dumps(model["vocab"]))
    lines = [
        "#version: 0.2",
        *(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
    ]
    (tmp_path / MERGES).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_vocabulary_and_merges_load_as_gpt2s_tokenizer(in_parts: Path) -> None:
    from transformers import GPT2Tokenizer

    ours = load_tokenizer(in_parts, small_config(vocab_size=320))
    theirs = GPT2Tokenizer(str(in_parts / VOCABULARY), str(in_parts / MERGES))
    assert ours.encode(SAMPLE + END_OF_TEXT) == theirs.encode(SAMPLE + END_OF_TEXT)
    assert ours.vocab_size == 320 and ours.eos_token_id == 0
    stream = ours.stream()
    assert isinstance(stream, ByteStream)
    assert "".join(stream.push(token_id) for token_id in [*ours.encode(SAMPLE), 0]) == SAMPLE


def test_the_tokenizer_that_a_config_names_is_converted(in_parts: Path) -> None:
    (in_parts / VOCABULARY).unlink()
    (in_parts / MERGES).unlink()
    (in_parts / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nhello\nworld\n")
    (in_parts / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = load_tokenizer(in_parts, small_config())
    assert tokenizer.encode("hello world", special=False) == [5, 6]
    assert tokenizer.encode("hello world") == [1, 5, 6, 2]
    assert isinstance(tokenizer.stream(), DecoderStream)


def test_a_tokenizers_remote_code_is_not_run(in_parts: Path) -> None:
    fields = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
    (in_parts / "tokenizer_config.json").write_text(json.dumps(fields))
    (in_parts / "trap.py").write_text(f"open({str(in_parts / 'sprung')!r}, 'w')\nclass Trap: ...\n")
    with pytest.raises(CheckpointError, match="has no tokenizer.json") as caught:
        load_tokenizer(in_parts, small_config(vocab_size=320))
    assert "\n" not in str(caught.value)
    assert not (in_parts / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (VOCABULARY, None),
        (MERGES, None),
        (VOCABULARY, "{"),
        (VOCABULARY, "[]"),
        (VOCABULARY, "{}"),
        (VOCABULARY, '{"a": -1}'),
        (MERGES, "a b c"),
        (MERGES, "zzz qqq"),
        (MERGES, "\xff\xfe"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "{"),
        ("config.json", "[]"),
    ],
)
def test_broken_parts_are_refused_in_one_line(in_parts: Path, name: str, content: str | None) -> None:
    if content is None:
        (in_parts / name).unlink()
    else:
        (in_parts / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match="has no tokenizer.json, and transformers cannot read"
    ) as caught:
        load_tokenizer(in_parts, small_config(vocab_size=320))
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer.json, and") as caught:
        load_tokenizer(tmp_path, small_config())
    assert "\n" not in str(caught.value)


def test_a_models_folder_without_a_vocabulary_has_no_tokenizer(in_parts: Path) -> None:
    (in_parts / VOCABULARY).unlink()
    (in_parts / MERGES).unlink()
    with pytest.raises(
        CheckpointError, match="has no tokenizer.json, and .* vocabulary in it: it is empty or absent$"
    ):
        load_tokenizer(in_parts, small_config())


CLASS_ONLY = {
    "nothing": {},
    "a class": {"tokenizer_class": "LlamaTokenizer"},
    "another class": {"tokenizer_class": "Qwen2Tokenizer"},
    "tokens": {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            "5": {"content": "<|im_end|>", "special": True},
            "6": {"content": "<tool_call>", "special": False},
        },
    },
}


@pytest.mark.parametrize("fields", CLASS_ONLY.values(), ids=CLASS_ONLY)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_any_family_without_a_vocabulary_has_no_tokenizer(tmp_path: Path, family, fields) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes(family) | {"model_type": family}))
    if fields:
        (tmp_path / CONFIG).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="has no tokenizer.json, and") as caught:
        load_tokenizer(tmp_path, small_config())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"model": {"type": "BPE"}}'])
def test_a_corrupt_tokenizer_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer") as caught:
        load_tokenizer(tmp_path, small_config())
    assert "\n" not in str(caught.value)


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
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(saved, small_config(vocab_size=400))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 50257])
def test_a_dummy_encodes_within_its_models_vocabulary(vocab_size: int) -> None:
    ids = load_dummy_tokenizer(small_config(vocab_size=vocab_size)).encode(SAMPLE)
    assert ids
    assert all(0 <= token_id < vocab_size for token_id in ids)


def test_a_dummy_decodes_and_streams_every_id_of_its_models_vocabulary() -> None:
    dummy = load_dummy_tokenizer(KNOWN_SHAPES["gpt2"])
    ids = [50256, 4096, 4097, *dummy.encode(CODE)]
    stream = dummy.stream()
    streamed = "".join(stream.push(token_id) for token_id in ids)
    assert streamed.endswith(CODE) and stream.finish() == ""
    assert dummy.decode(ids) == streamed


def test_a_dummy_tells_the_models_vocabulary_and_end_of_text() -> None:
    dummy = load_dummy_tokenizer(KNOWN_SHAPES["gpt2"])
    assert (dummy.vocab_size, dummy.eos_token_id) == (50257, 50256)
    assert load_dummy_tokenizer(small_config()).eos_token_id is None


# Special tokens that a checkpoint adds to every prompt


@pytest.fixture
def beginning(tmp_path: Path) -> Path:
    """A vocabulary whose post-processor puts <s> before every text, as Llama's does."""
    raw = train_tokenizer([CODE] * 3, vocab_size=320)._raw
    raw.add_special_tokens(["<s>", "</s>"])
    pieces = [("<s>", raw.token_to_id("<s>"))]
    raw.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", pieces)
    raw.save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.mark.parametrize("text", [SAMPLE, "", "<s>x</s>"])
def test_a_prompt_begins_as_the_checkpoint_says_and_as_in_transformers(beginning: Path, text: str) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (
        load_tokenizer(beginning, small_config(vocab_size=322)),
        AutoTokenizer.from_pretrained(beginning),
    )
    bare = ours.encode(text, special=False)
    assert ours.encode(text) == theirs.encode(text) == [320, *bare]
    assert bare == theirs.encode(text, add_special_tokens=False)


def test_texts_to_train_on_get_no_special_tokens(beginning: Path) -> None:
    tokenizer = load_tokenizer(beginning, small_config(vocab_size=322))
    assert tokenizer.encode_many([CODE, ""], special=False) == [tokenizer.encode(CODE, special=False), []]


@pytest.mark.parametrize("texts", [[], [SAMPLE], [SAMPLE, "", "<s>x</s>"]], ids=len)
def test_many_prompts_are_encoded_as_each_alone(beginning: Path, texts: list[str]) -> None:
    one = load_tokenizer(beginning, small_config(vocab_size=322))
    for tokenizer in (one, load_dummy_tokenizer(small_config())):
        assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


def test_of_many_prompts_the_bad_one_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"text 'b\\ud800' cannot be encoded"):
        tokenizer.encode_many(["a", "b\ud800", "c"])


def test_an_added_beginning_is_left_out_of_decoded_text(beginning: Path) -> None:
    tokenizer = load_tokenizer(beginning, small_config(vocab_size=322))
    ids, stream = [*tokenizer.encode(SAMPLE), 321], tokenizer.stream()
    assert tokenizer.decode(ids) == SAMPLE
    assert "".join(stream.push(token_id) for token_id in ids) + stream.finish() == SAMPLE


def test_the_shipped_model_and_gpt2_add_nothing_to_a_prompt(in_parts: Path) -> None:
    shipped = load_tokenizer(checkpoint_folder(SHIPPED), small_config(vocab_size=4096))
    gpt2 = load_tokenizer(in_parts, small_config(vocab_size=320))
    for tokenizer in (shipped, gpt2, load_dummy_tokenizer(small_config())):
        assert tokenizer.encode(SAMPLE) == tokenizer.encode(SAMPLE, special=False)
    assert shipped.encode("def f(x):\n    return x") == SHIPPED_IDS
    for tokenizer in (shipped, gpt2):
        assert tokenizer.encode_many([SAMPLE]) == [tokenizer.encode(SAMPLE)]


def test_a_tokenizer_knows_its_folder_and_a_dummy_has_none(saved: Path) -> None:
    assert load_tokenizer(saved, small_config(vocab_size=320)).folder == saved
    assert load_dummy_tokenizer(small_config()).folder is None
