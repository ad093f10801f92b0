"""Answers whose passage is searched again every few tokens."""
