"""Images of continuous latents that are drawn in any order: MAR, and its published checkpoints."""
