"""The museum of the ladder: decode steps driven by the host, ``dense`` to ``one_table``, each an override."""
