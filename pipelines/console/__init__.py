"""Options that the commands share, and their terminal."""
