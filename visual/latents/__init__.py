"""Images of continuous latents: a causal model whose every latent comes out of a diffusion head."""
