"""MAR: masked models of continuous latents in any order, and their published checkpoints."""
