"""A server that speaks OpenAI's protocol, for one process and its device."""
