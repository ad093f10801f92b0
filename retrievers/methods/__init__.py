"""Drafting methods over existing text, one file each."""
