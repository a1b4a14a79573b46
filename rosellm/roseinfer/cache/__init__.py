"""The paged KV cache: blocks, block tables, prefix cache, and per-sequence state on the device."""
