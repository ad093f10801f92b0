"""Answers whose passage is looked up anew every few tokens."""
