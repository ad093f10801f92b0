"""The model whose output is wanted: one forward over a tree for each row."""
