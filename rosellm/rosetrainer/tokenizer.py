"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from rosellm.errors import CheckpointError
from rosellm.rosetrainer.config import ModelConfig
from rosellm.rosetrainer.weights import SHIPPED, checkpoint_folder

END_OF_TEXT = "<|endoftext|>"
CODE_PIECES = r"\n+[ \t]*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[ \t]+(?!\S)|\s+"
"""A line break with the indentation after it, a name, up to three digits, punctuation, other white space."""


class TextStream:
    """Incremental decoding of one sequence: the pieces that :meth:`push` returns add up to the text."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw = raw
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a UTF-8 character is still in parts."""
        return self._stream.step(self._raw, token_id) or ""


class Tokenizer:
    """A tokenizer of a checkpoint; special tokens leave no trace in decoded text."""

    def __init__(self, raw: tokenizers.Tokenizer, eos_token_id: int | None) -> None:
        self._raw = raw
        self.eos_token_id = eos_token_id

    @property
    def vocab_size(self) -> int:
        return self._raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self._raw.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` of each text, on all cores."""
        return [encoding.ids for encoding in self._raw.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._raw.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        return TextStream(self._raw)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and ``tokenizer_config.json`` for ``transformers.AutoTokenizer``.

        Without the latter AutoTokenizer would split text as GPT-2 does, whatever the former says.
        """
        self._raw.save(str(folder / "tokenizer.json"), pretty=False)
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


class DummyStream:
    """A :class:`TextStream` for ids of a vocabulary that has no tokenizer."""

    def __init__(self, stream: TextStream, vocab_size: int) -> None:
        self._stream, self._vocab_size = stream, vocab_size

    def push(self, token_id: int) -> str:
        return self._stream.push(token_id % self._vocab_size)


class DummyTokenizer:
    """Stands in for the tokenizer of a model of ``vocab_size`` tokens with random weights.

    Text is encoded by ``shipped`` (ids beyond ``vocab_size`` wrap round), and any id is decoded as
    ``id % shipped.vocab_size``: readable nonsense, and nothing is downloaded.
    """

    def __init__(self, shipped: Tokenizer, vocab_size: int, eos_token_id: int | None) -> None:
        self._shipped = shipped
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        return [token_id % self.vocab_size for token_id in self._shipped.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._shipped.decode([token_id % self._shipped.vocab_size for token_id in ids])

    def stream(self) -> DummyStream:
        return DummyStream(self._shipped.stream(), self._shipped.vocab_size)


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer in ``folder/tokenizer.json``; without one in the config, ``<|endoftext|>`` ends a text.

    Raises CheckpointError for a missing or corrupt file and for a vocabulary larger than the model's.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json")
    raw = _read(path)
    size = raw.get_vocab_size(with_added_tokens=True)
    if size > config.vocab_size:
        raise CheckpointError(f"{path} has {size} tokens; the model has embeddings for {config.vocab_size}")
    eos = raw.token_to_id(END_OF_TEXT) if config.eos_token_id is None else config.eos_token_id
    return Tokenizer(raw, eos)


def load_dummy_tokenizer(config: ModelConfig) -> DummyTokenizer:
    """The tokenizer of ``--load-format dummy`` for a model of that shape."""
    raw = _read(checkpoint_folder(SHIPPED) / "tokenizer.json")
    shipped = Tokenizer(raw, raw.token_to_id(END_OF_TEXT))
    return DummyTokenizer(shipped, config.vocab_size, config.eos_token_id)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016, Radford et al. 2019) of at most ``vocab_size`` tokens.

    ``<|endoftext|>`` is id 0; the 256 bytes are always tokens, so every text can be encoded.
    """
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CODE_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return Tokenizer(raw, raw.token_to_id(END_OF_TEXT))


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
