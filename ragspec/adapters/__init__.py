"""Integrations of ragspec into other programs, one module for each."""
