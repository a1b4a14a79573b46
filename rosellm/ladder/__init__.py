"""The ladder's museum: the steps that the host drives, from ``dense`` to ``one_table``, each an override."""
