"""Executing and refreshing notebooks, the gallery, and README.md."""
