"""Speculation: guessing the next tokens of a sequence, so that one step can check several."""
