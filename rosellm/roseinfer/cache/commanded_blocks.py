"""KV blocks under tensor parallelism: rank 0 does the bookkeeping; each rank stores its own heads."""

from __future__ import annotations

from typing import Any

from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.ranks.group import Group


class CommandedBlocks(KVBlockManager):
    """A ``KVBlockManager`` that broadcasts block copies to every rank.

    Requires one pool shared by all layers, the only layout that several ranks support.
    """

    def __init__(self, group: Group, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copy = group.broadcast("copy_block", self._apply_copy)

    def clone_block(self, block_id: int, length: int) -> int:
        """See ``KVBlockManager``; with a single pool, a block's id is its index."""
        clone = super().clone_block(block_id, length)
        self._copy(block_id, clone)
        return clone

    def _apply_copy(self, source: int, target: int) -> None:
        """Copy the block on the device. Rank 0 has already done so; repeating it is harmless."""
        for cache in (self.k_cache, self.v_cache):
            cache[:, target].copy_(cache[:, source])
