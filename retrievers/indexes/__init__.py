"""Where a phrase stood before, found in microseconds."""
