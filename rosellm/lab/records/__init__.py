"""What is measured and recorded, and what the records allow to be said."""
