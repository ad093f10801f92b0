"""Text written on guesses of what a search would find, and checked."""
