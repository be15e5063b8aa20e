"""Ops on their way to the ranks: their format, the lines that issue them, and why their results fail."""
