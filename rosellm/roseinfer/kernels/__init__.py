"""Every Triton kernel under its torch specification, and the table of them."""
