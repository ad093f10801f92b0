"""Code that several benchmarks share, and benchmarks of several files."""
