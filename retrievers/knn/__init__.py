"""kNN language models: a datastore of hidden states with their next tokens, and its mixtures."""
