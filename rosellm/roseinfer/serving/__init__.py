"""Schedulers, admission of requests, and streaming of their text."""
