"""Data parallelism: replicas of an engine as Ray actors, and who gets which request."""
