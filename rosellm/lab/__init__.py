"""Code shared by the notebooks. ``records``, which measures, needs no more than the engine does."""
