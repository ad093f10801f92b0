"""Pipelines from prompts or classes to images, with the conventions of diffusers."""
