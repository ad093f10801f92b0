"""Draft heads, which draft from the target's hidden states, and the files that they come in."""
