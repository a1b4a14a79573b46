"""What the benchmark commands share."""
