"""Schedulers, admission of requests, and streaming of generated text."""
