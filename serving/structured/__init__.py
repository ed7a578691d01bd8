"""Structured output: what a request asks of its text, compiled into a grammar of tokens."""
