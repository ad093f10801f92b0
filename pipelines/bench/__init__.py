"""Variants of decoding and drawing measured side by side, in one run."""
