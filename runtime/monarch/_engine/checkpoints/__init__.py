"""Checkpoints of tensors over a mesh."""
