"""The commands of `ragspec`."""
