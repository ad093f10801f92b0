"""ragspec inside other programs, one module a host."""
