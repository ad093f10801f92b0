"""Variants of decoding and drawing measured in one batch, in one run."""
