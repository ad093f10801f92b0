"""Rules over latents: a drafted one is kept where the target might as well have drawn it."""
