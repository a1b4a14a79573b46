"""Try a reader's own kernel: check it against its specification, then run it as a rung of the ladder."""
