"""Checkpoints of distributed tensors."""
