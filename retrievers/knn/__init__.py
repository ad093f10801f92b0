"""A datastore of contexts and what followed them, and texts that are written by it."""
