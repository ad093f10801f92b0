"""The EAGLE-1 head, which drafts from the target's hidden states."""
