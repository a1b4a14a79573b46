"""The description of a decoder-only transformer as data: its sizes, and the variant of each part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rosellm.errors import CheckpointError, describe
from rosellm.models.checks import check, is_number, is_whole
from rosellm.models.rope import Rope

INT32_MAX = 2**31 - 1
MOST_LAYERS = 4096
PROJECTIONS = ("qkv", "out", "up", "down")
DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Norm:
    """The norm of a model.

    kind: "layer" for LayerNorm (Ba et al. 2016), "rms" for RMSNorm (Zhang & Sennrich 2019).
    eps: the epsilon added to the variance, or to the mean square.
    """

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check(is_number(self.eps, 0, 1), "norm_eps", self.eps, "a number above 0 and at most 1")


@dataclass(frozen=True)
class Arch:
    """The architecture of a model: its sizes, and the variant of each part; the defaults are those of GPT-2.

    n_positions: maximum number of tokens of a sequence.
    n_kv_heads: number of key/value heads, a divisor of ``n_heads`` (grouped-query attention, Ainslie et al.
        2023); None means ``n_heads``.
    head_dim: width of a head; None means ``d_model / n_heads``.
    d_ff: the MLP's width; None means ``4 * d_model``.
    rope: the rotary position embedding; None means learned position embeddings.
    mlp: "gelu" (tanh form) or "swiglu" (Shazeer 2020).
    biases: the names of the projections that have a bias.
    qk_norm: whether each head of q and k has an RMSNorm.
    scale: the factor on attention scores; None means ``head_dim ** -0.5``.
    window: number of tokens, including itself, that a token attends to; None means no limit.
    tie_embeddings: whether the head's weight is the token embedding.
    dtype: the name of the checkpoint's dtype, or None if its config has none.
    family: the ``model_type`` in ``config.json``.

    Raises ``CheckpointError`` for inconsistent sizes.
    """

    vocab_size: int
    n_positions: int
    n_layers: int
    n_heads: int
    d_model: int
    n_kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    d_ff: int = None  # type: ignore[assignment]
    norm: Norm = Norm()
    rope: Rope | None = None
    mlp: Literal["gelu", "swiglu"] = "gelu"
    biases: tuple[str, ...] = PROJECTIONS
    qk_norm: bool = False
    scale: float = None  # type: ignore[assignment]
    window: int | None = None
    tie_embeddings: bool = True
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = field(default=None, compare=False)
    family: str = "gpt2"
    quantization: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._check_sizes("vocab_size", "n_positions", "n_layers", "n_heads", "d_model")
        self._set_default("n_kv_heads", self.n_heads)
        self._set_default("d_ff", 4 * self.d_model)
        if self.head_dim is None and self.d_model % self.n_heads:
            raise CheckpointError(f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}")
        self._set_default("head_dim", self.d_model // self.n_heads)
        self._check_sizes("n_kv_heads", "d_ff", "head_dim", *([] if self.window is None else ["window"]))
        self._set_default("scale", self.head_dim**-0.5)
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.qk_norm and self.rope is None:
            raise CheckpointError("norms on q and k are supported with rotary embeddings only")
        if self.rope is not None and self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        check(isinstance(self.tie_embeddings, bool), "tie_embeddings", self.tie_embeddings, "true or false")
        for token in self.eos_token_ids:
            check(
                is_whole(token, 0, INT32_MAX), "eos_token_id", token, f"a token id (0 to {INT32_MAX}) or none"
            )
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPE_NAMES)
            raise CheckpointError(f"dtype {describe(self.dtype)} is not supported; {known} are")

    def _check_sizes(self, *names: str) -> None:
        for name in names:
            most = MOST_LAYERS if name == "n_layers" else INT32_MAX
            value = getattr(self, name)
            check(is_whole(value, 1, most), name, value, f"a whole number from 1 to {most}")

    def _set_default(self, name: str, default: float) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, default)

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def attention_width(self) -> int:
        """The total width of all query heads, which ``out`` projects back to ``d_model``."""
        return self.n_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """The number of rows of the joined query/key/value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def up_width(self) -> int:
        """The number of rows of the MLP's first projection, in which SwiGLU joins gate and up."""
        return self.d_ff * (2 if self.mlp == "swiglu" else 1)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The weight shape ``(outputs, inputs)`` of each projection, by name."""
        return {
            "qkv": (self.qkv_width, self.d_model),
            "out": (self.d_model, self.attention_width),
            "up": (self.up_width, self.d_model),
            "down": (self.d_model, self.d_ff),
        }

    @property
    def n_layer_parameters(self) -> int:
        """The number of parameters in one layer."""
        matrices = sum(n * k for n, k in self.shapes.values())
        biases = sum(self.shapes[name][0] for name in self.biases)
        norms = 2 * self.d_model * (2 if self.norm.kind == "layer" else 1)
        return matrices + biases + norms + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def n_parameters(self) -> int:
        """The number of parameters in the model; a tied embedding is counted once."""
        tables = 0 if self.tie_embeddings else self.vocab_size
        tables += self.n_positions if self.rope is None else 0
        return self.n_step_parameters + tables * self.d_model

    @property
    def n_step_parameters(self) -> int:
        """The number of parameters that every decode step reads: all layers, the last norm and the head."""
        last_norm = 2 if self.norm.kind == "layer" else 1
        return self.n_layers * self.n_layer_parameters + (self.vocab_size + last_norm) * self.d_model

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Return the number of bytes that one token takes in the KV cache, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * bytes_per_element
