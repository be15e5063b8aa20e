"""Cells that are simulated instead of run."""
