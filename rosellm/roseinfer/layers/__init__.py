"""What runs between token ids and tokens."""
