"""Checkpoints of actors."""
