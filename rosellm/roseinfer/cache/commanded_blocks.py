"""KV blocks of several ranks: rank 0 keeps the books, and every rank has the blocks of its own heads."""

from __future__ import annotations

from typing import Any

from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.ranks.group import Group


class CommandedBlocks(KVBlockManager):
    """With one pool for all layers, which is what ranks can run; arguments as of ``KVBlockManager``."""

    def __init__(self, group: Group, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copy = group.command("copy_block", self._copied)

    def clone_block(self, block_id: int, length: int) -> int:
        """See ``KVBlockManager``; a block's id is its index, in the only pool."""
        clone = super().clone_block(block_id, length)
        self._copy(block_id, clone)
        return clone

    def _copied(self, source: int, target: int) -> None:
        """What ``clone_block`` has done on rank 0, where doing it again changes nothing."""
        for cache in (self.k_cache, self.v_cache):
            cache[:, target].copy_(cache[:, source])
