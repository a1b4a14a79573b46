"""Earlier decode steps, kept for comparison: host-driven ones, and the first two GPU-resident ones."""
