"""Image models as targets, their tokenizers and their checkpoints."""
