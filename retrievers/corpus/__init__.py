"""Text on disk to draft from, which grows while in use."""
