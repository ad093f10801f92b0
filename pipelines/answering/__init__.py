"""Questions: search, prompt, answer, citations, over passages, one document or a conversation."""
