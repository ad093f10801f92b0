"""The drafting methods over text that exists, one file for each."""
