"""A kNN language model: a target and a datastore of the tokens after similar contexts."""
