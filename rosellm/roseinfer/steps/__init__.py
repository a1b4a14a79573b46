"""Prefill and decode steps, driven by the host or resident on the GPU."""
