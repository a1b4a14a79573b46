"""Train a tokenizer on text."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from rosellm.models.tokenizer import END_OF_TEXT, Tokenizer

CODE_PIECES = r"\n+[ \t]*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[ \t]+(?!\S)|\s+"
"""A line break and the indentation after it, a name, up to three digits, punctuation, other white space."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016, Radford et al. 2019) of at most ``vocab_size`` tokens.

    ``<|endoftext|>`` has id 0. The 256 bytes are always tokens, so every text can be encoded.
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
