"""KV-cache block accounting in plain integers."""
