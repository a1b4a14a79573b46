"""Run and refresh notebooks, the gallery, and README.md."""
