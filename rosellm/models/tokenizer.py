"""Text to token ids and back, with the `tokenizers` library."""

from __future__ import annotations

import json
import reprlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from rosellm.atomic import replacing, write_text
from rosellm.errors import CheckpointError, PromptError, RoseError
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder
from rosellm.models.named_tokens import named_class, named_tokens

END_OF_TEXT = "<|endoftext|>"
RESPLITTING = "LlamaTokenizer"
"""The class of transformers that puts rules of its own in place of a SentencePiece file's."""
CODE_PIECES = r"\n+[ \t]*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[ \t]+(?!\S)|\s+"
"""A line break and the indentation after it, a name, up to three digits, punctuation, other white space."""


class TextStream(Protocol):
    """Incremental decoding of one sequence: the returned pieces concatenate to its text.

    Not where bytes that are no UTF-8 make a decoder change what it has told: a piece is never taken back.
    """

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a UTF-8 character is incomplete."""

    def finish(self) -> str:
        """The rest: replacement characters for a character whose last bytes never came."""


class DecoderStream:
    """A :class:`TextStream` that uses the tokenizer's own decoder, whatever its kind."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw, self._n_told = raw, 0
        self._ids: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        try:
            piece = self._stream.step(self._raw, token_id) or ""
        except (
            Exception
        ):  # the library's only class of error: its text no longer begins with what it has told
            piece = self.finish()
            self._stream = DecodeStream(self._ids[-1:], skip_special_tokens=True)
        self._n_told += len(piece)
        return piece

    def finish(self) -> str:
        return self._raw.decode(self._ids, skip_special_tokens=True)[self._n_told :]


class TokenBytes:
    """The text of token ids; ``find`` computes the bytes of one, which are kept."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find
        self._known: dict[int, bytes] = {}

    def text(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence, a replacement character for bytes that are no UTF-8."""
        try:
            return self._join(ids)
        except KeyError:
            news = {token_id for token_id in ids if token_id not in self._known}
            self._known.update(zip(news, map(self._find, news), strict=True))
            return self._join(ids)

    def _join(self, ids: Sequence[int]) -> str:
        known = self._known  # itemgetter is the fastest, and gives no tuple of one id or none
        pieces = itemgetter(*ids)(known) if len(ids) > 1 else map(known.__getitem__, ids)
        return b"".join(pieces).decode(errors="replace")


class BytePieces(dict[int, str | bytes]):
    """Cache of token id → text, or bytes if they are not whole characters; ``find`` computes the bytes."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> str | bytes:
        self[token_id] = piece = self._find(token_id)
        with suppress(UnicodeDecodeError):
            self[token_id] = piece.decode()
        return self[token_id]


class ByteStream:
    """A :class:`TextStream` for byte-level vocabularies: most tokens cost one dict lookup."""

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._begun = False  # inside a character whose last bytes are still to come
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece.__class__ is str and not self._begun:
            return piece
        return self._join(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _join(self, piece: str | bytes) -> str:
        text = self._decoder.decode(piece if isinstance(piece, bytes) else piece.encode())
        self._begun = bool(self._decoder.getstate()[0])
        return text


class Tokenizer:
    """A checkpoint's tokenizer; decoded text leaves out special tokens. ``folder``: where it was read."""

    def __init__(
        self, raw: tokenizers.Tokenizer, eos_token_id: int | None, folder: Path | None = None
    ) -> None:
        self._raw = raw
        self.eos_token_id, self.folder = eos_token_id, folder
        self._bytes = TokenBytes(self.token_bytes)
        self._pieces = BytePieces(self.token_bytes)
        self._is_byte_level = isinstance(raw.decoder, decoders.ByteLevel)
        self._special = {str(t) for t in raw.get_added_tokens_decoder().values() if t.special}

    @property
    def vocab_size(self) -> int:
        return self._raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt.

        special: with the tokens that the checkpoint adds to every text, most often one at its beginning. A
        rendered chat has them already. Raises ``PromptError`` for text that the vocabulary, or UTF-8, cannot
        represent.
        """
        try:
            return self._raw.encode(text, add_special_tokens=special).ids
        except BaseException as error:
            told = f"text {reprlib.repr(text)} cannot be encoded"
            raise refusal(PromptError, told, error) from error

    def encode_many(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Like :meth:`encode`, for each text: equal ones once, several on all cores.

        The error is that of the first bad text.
        """
        distinct = list(dict.fromkeys(texts))
        known = dict(zip(distinct, self._encode_distinct(distinct, special), strict=True))
        return [known[text].copy() for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        if self._is_byte_level:
            return self._bytes.text(ids)
        return self._raw.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        return ByteStream(self._pieces) if self._is_byte_level else DecoderStream(self._raw)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token of a byte-level vocabulary; empty for special and unknown tokens."""
        token = self._raw.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        values = byte_of_character()
        return bytes(values[c] for c in token) if values.keys() >= set(token) else token.encode()

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and ``tokenizer_config.json`` for ``transformers.AutoTokenizer``.

        Without the second file AutoTokenizer would split text like GPT-2, whatever the first one says.
        """
        with replacing(folder / "tokenizer.json") as unfinished:
            self._raw.save(str(unfinished), pretty=False)
        ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
        write_text(folder / "tokenizer_config.json", json.dumps(fields, indent=1) + "\n")

    def _encode_distinct(self, texts: list[str], special: bool) -> list[list[int]]:
        if len(texts) < 2:
            return [self.encode(text, special) for text in texts]
        try:
            return [one.ids for one in self._raw.encode_batch_fast(texts, add_special_tokens=special)]
        except BaseException:
            for text in texts:
                self.encode(text, special)
            raise


class DummyTokenizer:
    """Stands in for the tokenizer of a model of ``vocab_size`` tokens with random weights.

    Text is encoded by ``shipped`` (ids beyond ``vocab_size`` wrap round), and any id is decoded as
    ``id % shipped.vocab_size``: readable nonsense, and nothing is downloaded.
    """

    folder = None

    def __init__(self, shipped: Tokenizer, vocab_size: int, eos_token_id: int | None) -> None:
        self._shipped = shipped
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        size = shipped.vocab_size
        self._bytes = TokenBytes(lambda token_id: shipped.token_bytes(token_id % size))
        self._pieces = BytePieces(lambda token_id: shipped.token_bytes(token_id % size))

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [token_id % self.vocab_size for token_id in self._shipped.encode(text, special)]

    def encode_many(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        many = self._shipped.encode_many(texts, special)
        return [[token_id % self.vocab_size for token_id in ids] for ids in many]

    def decode(self, ids: Sequence[int]) -> str:
        return self._bytes.text(ids)

    def stream(self) -> TextStream:
        return ByteStream(self._pieces)


@cache
def byte_of_character() -> dict[str, int]:
    """Character → byte in byte-level vocabularies; printable Latin-1 maps to itself (Radford et al. 2019)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = (b for b in range(256) if chr(b) not in alphabet)
    return {c: ord(c) if ord(c) < 256 else next(others) for c in alphabet}


def load_tokenizer(folder: Path, config: Arch) -> Tokenizer:
    """A checkpoint's tokenizer; its ``eos_token_id`` is the config's first, or that of ``<|endoftext|>``.

    Raises CheckpointError for missing or corrupt files and for a vocabulary larger than the model's.
    """
    raw = _read(folder)
    n_ids = 1 + max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
    if n_ids > config.vocab_size:
        raise CheckpointError(
            f"{folder}'s tokenizer has token ids up to {n_ids - 1}; "
            f"the model has embeddings for {config.vocab_size} tokens"
        )
    eos = config.eos_token_ids[0] if config.eos_token_ids else raw.token_to_id(END_OF_TEXT)
    return Tokenizer(raw, eos, folder)


def load_dummy_tokenizer(config: Arch) -> DummyTokenizer:
    """The tokenizer of ``--load-format dummy`` for a model of that shape."""
    raw = _read(checkpoint_folder(SHIPPED))
    shipped = Tokenizer(raw, raw.token_to_id(END_OF_TEXT))
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    return DummyTokenizer(shipped, config.vocab_size, eos)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016, Radford et al. 2019) of at most ``vocab_size`` tokens.

    ``<|endoftext|>`` is id 0; the 256 bytes are always tokens, so every text can be encoded.
    """
    raw = tokenizers.Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(CODE_PIECES), behavior="isolated")
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pieces, spelling])
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    return Tokenizer(raw, raw.token_to_id(END_OF_TEXT))


def _read(folder: Path) -> tokenizers.Tokenizer:
    """The folder's tokenizer, without truncation or padding, whatever its file says (as in transformers)."""
    path = folder / "tokenizer.json"
    if path.is_file():
        failure = f"{path} cannot be read as a tokenizer"
    else:
        failure = f"{folder} has no tokenizer.json, and transformers cannot read any other vocabulary in it"
    try:
        raw = _with_named(path) if path.is_file() else _convert(folder)
    except CheckpointError:
        raise
    except BaseException as error:
        raise refusal(CheckpointError, failure, error) from error
    raw.no_truncation()
    raw.no_padding()
    return raw


def _with_named(path: Path) -> tokenizers.Tokenizer:
    """A ``tokenizer.json``, or what transformers makes of its folder.

    That counts if the folder names tokens that the file lacks, or a class that splits text in its own way.
    """
    raw, named = tokenizers.Tokenizer.from_file(str(path)), named_tokens(path.parent)
    if _is_resplit(path) or any(raw.token_to_id(token) is None for token in named):
        return _convert(path.parent)
    special = {str(token) for token in raw.get_added_tokens_decoder().values() if token.special}
    news = [token for token, is_special in named.items() if is_special and token not in special]
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in news])
    return raw


def _is_resplit(path: Path) -> bool:
    """Whether transformers may split text otherwise than the file says, which a byte-level one decides."""
    return named_class(path.parent) == RESPLITTING and '"ByteLevel"' not in path.read_text(encoding="utf-8")


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer that ``transformers`` builds from a folder, such as one of vocab.json and merges.txt.

    A whole byte-level tokenizer.json is read directly: transformers' GPT-2 and Qwen2 classes replace the
    file's own pre-tokenizer, and its import takes half a second. No code from the folder is run.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    raw = theirs.backend_tokenizer
    added = {str(token) for token in raw.get_added_tokens_decoder().values()}
    if not raw.get_vocab(with_added_tokens=False).keys() - added:  # at most what its class begins with
        raise ValueError("it is empty or absent")
    return raw


def refusal(kind: type[RoseError], told: str, error: BaseException) -> RoseError:
    """A library's ``error`` in one line of our own ``kind``; what is no library's is raised again.

    `tokenizers` raises bare Exceptions, and Rust panics that do not derive from Exception.
    """
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    return kind(f"{told}: {' '.join(str(error).split())}")
