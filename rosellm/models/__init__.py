"""What a model is: shape, weights, tokenizer; it knows nothing of the engine."""
