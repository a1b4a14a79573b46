"""The inference engine: KV blocks, kernels, the decode step, schedulers and benchmark commands."""
