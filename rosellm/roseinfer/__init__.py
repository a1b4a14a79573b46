"""The inference engine: the KV cache, kernels, prefill and decode steps, schedulers and streaming."""
