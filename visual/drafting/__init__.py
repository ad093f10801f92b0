"""Drafts of image codes and of continuous latents."""
