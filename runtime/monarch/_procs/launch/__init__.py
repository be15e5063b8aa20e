"""Launchers, one file each: they start host agents."""
