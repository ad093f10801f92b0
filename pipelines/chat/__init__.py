"""Conversations: turns that are kept and read once, over documents or without."""
