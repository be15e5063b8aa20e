"""Shared memory for large frames."""
