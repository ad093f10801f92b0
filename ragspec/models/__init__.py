"""From a name to a transformers model that the core can use."""
