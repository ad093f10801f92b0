"""What the commands share: options, and the terminal that they write to."""
