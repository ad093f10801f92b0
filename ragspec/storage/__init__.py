"""Crash-safe folders with hashes."""
