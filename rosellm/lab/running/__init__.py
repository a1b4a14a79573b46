"""Execute notebooks, refresh their committed outputs, and make the gallery."""
