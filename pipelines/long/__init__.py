"""Questions over one long document that is read once."""
