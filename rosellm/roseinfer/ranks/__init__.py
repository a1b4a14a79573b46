"""The ranks of one engine: collectives, command broadcast and failure detection."""
