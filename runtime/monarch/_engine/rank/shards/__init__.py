"""Shards of tensors that a rank makes, and their random numbers."""
