"""Measure, record, and state what the records support."""
