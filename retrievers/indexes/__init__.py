"""Indexes that find earlier occurrences of a phrase in microseconds."""
