"""Token Recycling's tables of the target's best tokens after each token."""
