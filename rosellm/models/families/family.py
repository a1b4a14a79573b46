"""Model families as data: the fields of their ``config.json`` and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch, Norm
from rosellm.models.checks import check, is_whole
from rosellm.models.rope import read_rope

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """A model family; each file in ``families`` defines one as ``FAMILY``.

    architecture: the name of the model class in transformers.
    needed, optional: map fields of ``Arch`` to required and optional fields of ``config.json``.
    norm: the kind of norm and its default epsilon.
    eps: the config field of the epsilon.
    only: the supported values of other config fields, the default first.
    tensors: maps the name of a weight, with ``{}`` for the layer, to the names of the checkpoint's tensors
        whose rows the weight joins, in order.
    prefix: a prefix of tensor names that checkpoints may omit.
    transposed: names of the weights that are stored as ``[inputs, outputs]``.
    is_rotary: whether positions are embedded by rotation, not by learned embeddings.
    defaults: config defaults of transformers that differ from those of ``Arch``.
    parts: fields of ``Arch`` that are the same in all models of the family.
    read_own, write_own: convert the remaining fields of ``config.json`` from and to an ``Arch``.
    """

    architecture: str
    needed: Mapping[str, str]
    optional: Mapping[str, str]
    norm: Norm
    eps: str
    only: Mapping[str, tuple]
    tensors: Mapping[str, tuple[str, ...]]
    prefix: str
    transposed: frozenset[str] = frozenset()
    is_rotary: bool = True
    defaults: Config = field(default_factory=dict)
    parts: Config = field(default_factory=dict)
    read_own: Callable[[Arch, Config], Arch] = lambda arch, config: arch
    write_own: Callable[[Arch], Config] = lambda arch: {}

    def read(self, config: Config) -> Arch:
        """Return the ``Arch`` of a ``config.json``; raise ``CheckpointError`` if it is not supported."""
        config = self.defaults | config
        if missing := [theirs for theirs in self.needed.values() if config.get(theirs) is None]:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        for name, values in self.only.items():
            _check_supported(name, config.get(name, values[0]), values)
        names = {**self.needed, **self.optional}
        arch = Arch(
            **{ours: config[theirs] for ours, theirs in names.items() if theirs in config},
            **self.parts,
            norm=replace(self.norm, eps=config.get(self.eps, self.norm.eps)),
            rope=read_rope(config) if self.is_rotary else None,
            eos_token_ids=eos_ids(config),
            dtype=config.get("torch_dtype") if config.get("dtype") is None else config["dtype"],
            family=config["model_type"],
        )
        return self.read_own(_stretched(arch), config)

    def write(self, arch: Arch) -> Config:
        """Return the fields of a ``config.json`` that :meth:`read` and ``transformers`` understand."""
        ids = list(arch.eos_token_ids)
        return {
            "architectures": [self.architecture],
            "model_type": arch.family,
            **{theirs: getattr(arch, ours) for ours, theirs in {**self.needed, **self.optional}.items()},
            self.eps: arch.norm.eps,
            **{name: values[0] for name, values in self.only.items()},
            **({} if arch.rope is None else {"rope_parameters": arch.rope.parameters}),
            "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
            "bos_token_id": None,
            **self.write_own(arch),
        }


def _check_supported(name: str, value: Any, supported: tuple) -> None:
    if not any(type(value) is type(one) and value == one for one in supported):
        known = " or ".join(map(repr, supported))
        raise CheckpointError(f"{name} {describe(value)} is not supported; only {known} is")


def _stretched(arch: Arch) -> Arch:
    """Return ``arch`` with its ``n_positions`` after YaRN scaling; Qwen's configs give it before scaling."""
    if arch.rope is None or arch.rope.rope_type != "yarn":
        return arch
    fields = arch.rope.parameters
    stretched = int(fields["original_max_position_embeddings"] * fields["factor"])
    return replace(arch, n_positions=max(arch.n_positions, stretched))


def flag(config: Config, name: str) -> bool:
    """Return a boolean field of ``config``, or False if the field is absent.

    Raises ``CheckpointError`` if the value is not a boolean.
    """
    found = config.get(name, False)
    check(isinstance(found, bool), name, found, "true or false")
    return found


def with_window(arch: Arch, config: Config) -> Arch:
    """Return ``arch`` with the sliding window of the config, if all layers use it.

    Raises ``CheckpointError`` if only some layers use it, or if the fields contradict each other.
    """
    window = config["sliding_window"] if flag(config, "use_sliding_window") else None
    n_layers, kinds = arch.n_layers, config.get("layer_types")
    if kinds is None:
        n_full = n_layers if window is None else config["max_window_layers"]
        check(is_whole(n_full, 0, 2**63), "max_window_layers", n_full, "a whole number")
        kinds = [FULL] * min(n_full, n_layers) + [SLIDING] * (n_layers - n_full)
    is_list = isinstance(kinds, list) and len(kinds) == n_layers
    if not is_list or any(kind not in (FULL, SLIDING) for kind in kinds):
        needed = f"a list of {n_layers} kinds, each {FULL} or {SLIDING},"
        check(False, "layer_types", kinds, needed)
    if FULL in kinds and SLIDING in kinds:
        raise CheckpointError(f"layers of {FULL} and of {SLIDING} in one model are not supported")
    if SLIDING in kinds and window is None:
        raise CheckpointError(f"layer_types names {SLIDING}, but there is no sliding_window in use")
    return replace(arch, window=window if SLIDING in kinds else None)


def eos_ids(config: Config) -> tuple[int, ...]:
    """Return the end-of-sequence ids; ``eos_token_id`` may be absent, one id or a list."""
    given = config.get("eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)
