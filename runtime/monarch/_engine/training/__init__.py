"""Modules whose parameters are tensors of a mesh."""
