"""SentencePiece vocabularies, as of Llama 2: the ids of ``transformers``, whose class outranks the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rosellm.models.chat import render_chat
from rosellm.models.tokenizer import load_tokenizer
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import small_config
from tests.models.family_checks import sizes

SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = "hello there, more words: a b c [INST] is what a user says [/INST] and it ends\n"
TEXTS = [
    "hello there", "  a  b", " lead", "x\n  y", "é🙂", "", "▁a", "\ta", "a </s> b", "</s>x", "a<s>  b</s>",
    "  </s>",
]  # fmt: skip
TEMPLATE = """{% for m in messages %}
{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"""
CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "  a b"},
    {"role": "user", "content": " more"},
]
CONFIG = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True,
    "add_eos_token": False, "chat_template": TEMPLATE,
}  # fmt: skip
READ_BY = {
    "": {"tokenizer_class": "LlamaTokenizer"},
    "legacy": {"tokenizer_class": "LlamaTokenizer", "legacy": True},
    "not legacy": {"tokenizer_class": "LlamaTokenizerFast", "legacy": False},
    "no prefix": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
    "an end": {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True},
    "the file": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "no class": {},
}


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """As Llama 2's converted file: a normaliser that puts ▁ before every text and for every space."""
    raw = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    raw.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=tokens))
    fields = json.loads(raw.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] in SPECIAL]
    raw = tokenizers.Tokenizer.from_str(json.dumps(fields | {"pre_tokenizer": None}))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(list(parts))
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return raw


def saved(raw: tokenizers.Tokenizer, folder: Path, fields: dict, family: str = "llama") -> Path:
    """A checkpoint's folder with that tokenizer."""
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | fields))
    (folder / "config.json").write_text(json.dumps(sizes(family) | {"model_type": family}))
    return folder


def check_equal(folder: Path) -> None:
    """The ids of transformers for every text, for a chat, and back."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder, small_config(vocab_size=500)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode_many(TEXTS) == [theirs.encode(text) for text in TEXTS]
    ids = theirs.apply_chat_template(CHAT, return_dict=False)
    assert ours.encode(render_chat(folder, CHAT), special=False) == ids and ids.count(1) == 2


CASES = {name: (fields, "llama") for name, fields in READ_BY.items()}
CASES |= {family: (READ_BY[""], family) for family in ("mistral", "phi3")}


@pytest.mark.parametrize(("fields", "family"), CASES.values(), ids=CASES)
def test_texts_and_chats_have_the_ids_of_transformers(trained, tmp_path, fields, family):
    check_equal(saved(trained, tmp_path, fields, family))


def test_a_byte_level_file_is_read_as_it_is_whatever_class_is_named(tmp_path):
    raw = train_tokenizer([WORDS] * 3, 300)._raw
    tokenizer = load_tokenizer(saved(raw, tmp_path, READ_BY[""]), small_config(vocab_size=500))
    plain = [text for text in TEXTS if "s>" not in text]
    assert [tokenizer.encode(text) for text in plain] == [raw.encode(text).ids for text in plain]
