"""Tensors of a mesh after deaths of ranks."""
