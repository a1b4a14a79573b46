"""What a family's file provides: how its ``config.json`` and its tensors are read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """One file of ``families``, whose ``FAMILY`` it is.

    model_types: the ``model_type`` of the checkpoints that it reads. read: ``config.json`` → ``Arch``; write:
    the fields that ``transformers`` needs to read it back. tensors: a weight's name here, with ``{}`` for the
    layer → names in the checkpoint, whose rows are joined in that order; a name that it lacks altogether is
    left out. prefix: what a checkpoint may leave out of its names. transposed: those stored as ``[K, N]``.
    """

    model_types: tuple[str, ...]
    read: Callable[[Config], Arch]
    write: Callable[[Arch], Config]
    tensors: Mapping[str, tuple[str, ...]]
    prefix: str
    transposed: frozenset[str] = frozenset()


def renamed(config: Config, names: Mapping[str, str], needed: tuple[str, ...]) -> Config:
    """``Arch``'s fields by ``names``, which maps them to a config's; those of ``needed`` may not be null.

    Raises ``CheckpointError``.
    """
    missing = [names[ours] for ours in needed if config.get(names[ours]) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    return {ours: config[theirs] for ours, theirs in names.items() if theirs in config}


def check_only(config: Config, only: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` for a field that has another value than the one supported."""
    for name, value in only.items():
        if config.get(name, value) != value or type(config.get(name, value)) is not type(value):
            raise CheckpointError(f"{name} {describe(config[name])} is not supported; only {value!r} is")


def flag(config: Config, name: str) -> bool:
    """A field that is true or false; false if it is absent."""
    if not isinstance(found := config.get(name, False), bool):
        raise CheckpointError(f"{name} is {describe(found)}; true or false is needed")
    return found


def with_window(arch: Arch, window: Any, layer_types: Any, n_full: int = 0) -> Arch:
    """``arch`` with ``window`` if all its layers slide, and without one if all attend to all tokens before.

    layer_types: each layer's kind; None: all but the first ``n_full`` slide, if there is a window. Raises
    ``CheckpointError``, for a mixture too.
    """
    n_layers = arch.n_layers
    if layer_types is None:
        n_full = n_layers if window is None else min(n_full, n_layers)
        layer_types = [FULL] * n_full + [SLIDING] * (n_layers - n_full)
    _check_kinds(layer_types, n_layers)
    n_sliding = layer_types.count(SLIDING)
    if 0 < n_sliding < n_layers:
        raise CheckpointError(
            f"{n_layers - n_sliding} layers of {FULL} mixed with {n_sliding} of {SLIDING} are not supported; "
            "all layers must be of one kind"
        )
    if n_sliding and window is None:
        raise CheckpointError(f"layer_types name {SLIDING}, but there is no sliding_window in use")
    return replace(arch, window=window if n_sliding else None)


def _check_kinds(layer_types: Any, n_layers: int) -> None:
    if not isinstance(layer_types, list) or len(layer_types) != n_layers:
        given = f"has {len(layer_types)}" if isinstance(layer_types, list) else f"is {describe(layer_types)}"
        raise CheckpointError(f"layer_types {given}; a list of {n_layers} kinds, one a layer, is needed")
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            raise CheckpointError(
                f"layer_types name {describe(kind)}, which is not supported; {FULL} and {SLIDING} are"
            )


def eos_ids(config: Config) -> tuple[int, ...]:
    """``eos_token_id``, which may be absent, one id or a list of them."""
    given = config.get("eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)


def eos_field(arch: Arch) -> int | list[int] | None:
    """What :func:`eos_ids` reads."""
    ids = list(arch.eos_token_ids)
    return ids[0] if len(ids) == 1 else ids or None


def dtype_of(config: Config) -> str | None:
    """The checkpoint's dtype: ``dtype``, or ``torch_dtype`` in older files."""
    found = config.get("dtype")
    return config.get("torch_dtype") if found is None else found
