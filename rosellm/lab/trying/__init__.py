"""A reader's own kernel: checked against its specification, then run as a rung of the ladder."""
