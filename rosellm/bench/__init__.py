"""The benchmark commands, and the code that they share."""
