"""Draft trees: what they are, and what is derived from them."""
