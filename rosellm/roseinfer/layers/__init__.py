"""From token ids to next tokens: layers, attention, matrix products, token selection."""
