"""RAPID: a model over retrieved chunks drafts for one over the whole document, or steers it."""
