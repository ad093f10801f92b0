"""The EAGLE-1 head: drafts from the target's own hidden states."""
