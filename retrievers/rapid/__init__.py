"""RAPID: a model that reads what was retrieved drafts for one that reads all, or steers it."""
