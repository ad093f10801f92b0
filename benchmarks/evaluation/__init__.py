"""Pictures, curves, distances and pages of measurements."""
