"""Conversations with chat models, with or without documents."""
