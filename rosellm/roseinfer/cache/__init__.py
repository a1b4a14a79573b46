"""The paged KV cache: its blocks, tables, prefixes, and what the device keeps of each sequence."""
