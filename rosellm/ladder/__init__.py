"""Earlier decode steps, kept for comparison: those driven by the host, and the first two resident ones."""
