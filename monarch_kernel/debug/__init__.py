"""Verbs that pause ranks, and look at paused and running ones."""
