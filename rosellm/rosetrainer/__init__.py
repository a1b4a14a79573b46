"""Training of the shipped models, and attention over a paged KV cache."""
