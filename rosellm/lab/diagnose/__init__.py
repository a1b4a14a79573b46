"""Diagnose where the time of a decode step goes on this machine, and what would shorten the step."""
