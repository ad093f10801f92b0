"""Relaxed acceptance: a code that looks like the model's own may stand in its place."""
