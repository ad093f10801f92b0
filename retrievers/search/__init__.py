"""From files to passages, and from a question to the passages that may answer it."""
