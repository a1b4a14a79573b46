"""The shape of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rosellm.errors import CheckpointError

INT32_MAX = 2**31 - 1
MOST_LAYERS = 4096
_NEEDED = ("vocab_size", "n_positions", "n_layers", "n_heads", "d_model")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer of the GPT-2 family.

    ``n_kv_heads`` may divide ``n_heads`` (grouped-query attention, Ainslie et al. 2023); None, as in GPT-2,
    makes them equal. ``d_ff`` None is ``4 * d_model``. Raises ``CheckpointError``.
    """

    vocab_size: int
    n_positions: int
    n_layers: int
    n_heads: int
    d_model: int
    n_kv_heads: int = None  # type: ignore[assignment]
    d_ff: int = None  # type: ignore[assignment]
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _NEEDED:
            self._check_positive(name)
        for name, default in (("n_kv_heads", self.n_heads), ("d_ff", 4 * self.d_model)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            self._check_positive(name)
        eps = self.norm_eps
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 < eps <= 1:
            raise CheckpointError(f"norm_eps is {eps!r}; a number above 0 and at most 1 is needed")
        if not isinstance(self.tie_embeddings, bool):
            raise CheckpointError(f"tie_embeddings is {self.tie_embeddings!r}; true or false is needed")
        eos = self.eos_token_id
        if eos is not None and not _is_whole(eos, 0, INT32_MAX):
            raise CheckpointError(
                f"eos_token_id is {eos!r}; one token id (0 to {INT32_MAX}) or none is needed"
            )
        if self.d_model % self.n_heads:
            raise CheckpointError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")

    def _check_positive(self, name: str) -> None:
        value, most = getattr(self, name), MOST_LAYERS if name == "n_layers" else INT32_MAX
        if not _is_whole(value, 1, most):
            raise CheckpointError(f"{name} is {value!r}; a whole number from 1 to {most} is needed")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query/key/value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        c, f = self.d_model, self.d_ff
        layer = c * self.qkv_width + self.qkv_width + c * c + c + 2 * c * f + f + c + 4 * c
        head = 0 if self.tie_embeddings else self.vocab_size * c
        return (self.vocab_size + self.n_positions) * c + self.n_layers * layer + 2 * c + head

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV cache per token, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * bytes_per_element

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelConfig:
        """From the fields of a Hugging Face GPT-2 ``config.json``."""
        if hf.get("model_type") != "gpt2":
            raise CheckpointError(f"model_type {hf.get('model_type')!r} is not supported; only 'gpt2' is")
        activation = hf.get("activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh"):
            raise CheckpointError(f"activation_function {activation!r} is not supported; 'gelu_new' is")
        for name, only in _FIXED.items():
            if hf.get(name, only) is not only:
                raise CheckpointError(f"{name} {hf[name]!r} is not supported; only {only} is")
        missing = [theirs for ours, theirs in _HF_NAMES.items() if ours in _NEEDED and theirs not in hf]
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        return cls(**{ours: hf[theirs] for ours, theirs in _HF_NAMES.items() if theirs in hf})

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` fields that :meth:`from_hf` and ``transformers`` read."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(self, ours) for ours, theirs in _HF_NAMES.items()},
            "n_ctx": self.n_positions,
            "activation_function": "gelu_new",
            "bos_token_id": self.eos_token_id,
        }


# ModelConfig's fields as Hugging Face's GPT-2 config names them. ``transformers.GPT2Config`` is not used
# to read them: it checks no ranges, fills in the 124 M model's sizes, and takes half a second to import.
_HF_NAMES = {
    "vocab_size": "vocab_size",
    "n_positions": "n_positions",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
    "eos_token_id": "eos_token_id",
}
# Attention options of GPT-2's config, and the only value that this model supports.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


KNOWN_SHAPES: dict[str, ModelConfig] = {
    name: ModelConfig(50257, 1024, n_layers, n_heads, d_model, eos_token_id=50256)
    for name, (n_layers, n_heads, d_model) in {
        "gpt2": (12, 12, 768),
        "gpt2-medium": (24, 16, 1024),
        "gpt2-large": (36, 20, 1280),
        "gpt2-xl": (48, 25, 1600),
    }.items()
}
