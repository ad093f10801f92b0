"""Figures of a run, and its trace on disk."""
