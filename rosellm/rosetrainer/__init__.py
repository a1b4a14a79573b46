"""Training of the model that ships, and attention over a paged KV cache."""
