"""Load files, split them into passages, and search the passages."""
