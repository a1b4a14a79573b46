"""Triton kernels, their torch reference implementations, and a table of both."""
