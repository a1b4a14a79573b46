"""Prefill and decode steps: their interface, and the steps that are resident on the GPU."""
