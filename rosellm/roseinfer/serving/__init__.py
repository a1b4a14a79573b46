"""Schedulers, admission, streaming: who runs when."""
