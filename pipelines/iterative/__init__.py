"""Answers whose passage is looked up again every few tokens."""
