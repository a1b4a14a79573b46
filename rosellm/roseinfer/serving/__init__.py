"""Who runs when: schedulers, admission, streaming."""
