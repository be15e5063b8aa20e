"""Modules whose parameters are distributed tensors."""
