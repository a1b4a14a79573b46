"""From token ids to next tokens: layers, attention, GEMMs, token selection."""
