"""What the benchmarks share, and those with several files."""
