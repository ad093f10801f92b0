"""Images of continuous latents: a causal model with a diffusion head that samples each latent."""
