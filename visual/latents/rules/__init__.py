"""Acceptance rules over continuous latents."""
