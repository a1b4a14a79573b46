"""Code shared by the notebooks.

The subpackage ``records``, which measures, needs only the engine's packages.
"""
