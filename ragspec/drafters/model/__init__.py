"""Drafts from a smaller model of the same vocabulary."""
