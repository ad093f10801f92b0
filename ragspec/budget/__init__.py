"""How much of a draft is verified, and which sources are asked."""
