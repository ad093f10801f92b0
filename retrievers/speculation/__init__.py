"""Speculative retrieval: text written with guesses of the search's answers, then checked."""
