"""A kNN language model: a target, and a datastore that says what came next elsewhere."""
