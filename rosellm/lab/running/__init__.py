"""Executing and refreshing notebooks, the gallery, the README."""
