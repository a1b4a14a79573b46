"""Triton kernels beside their torch specifications, and the table of them."""
