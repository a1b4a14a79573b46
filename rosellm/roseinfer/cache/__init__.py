"""The paged KV cache: blocks, block tables, the prefix cache, and per-sequence state on the device."""
