"""Models: their architectures, weights and tokenizers, independent of the engine."""
