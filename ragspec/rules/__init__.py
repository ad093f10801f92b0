"""Acceptance rules: which nodes of a draft are kept, and the token that follows them."""
