"""Pausing ranks, and looking at paused and running ones."""
