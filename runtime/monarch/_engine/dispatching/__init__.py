"""Ops on tensors of a mesh: how they run, and the metadata of their results."""
