"""Hosts of a launcher: the wait for them, their attachment, and those that come later."""
