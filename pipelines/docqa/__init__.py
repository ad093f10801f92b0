"""Questions over documents: search, prompt, answer, citations."""
