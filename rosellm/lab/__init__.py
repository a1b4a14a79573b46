"""What the notebooks share, and what runs them."""
