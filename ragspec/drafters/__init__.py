"""Drafters, which propose tokens, and combinations of drafters."""
