"""The ranks of one engine: what they sum, gather and are told, and how long they live."""
