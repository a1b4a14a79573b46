"""Charts, diagrams and controls."""
