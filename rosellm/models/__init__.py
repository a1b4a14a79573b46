"""The model: shape, weights, tokenizer; independent of the engine."""
