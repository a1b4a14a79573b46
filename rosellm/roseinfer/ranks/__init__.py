"""The ranks of one engine: collectives, calls sent to every rank, and failure detection."""
