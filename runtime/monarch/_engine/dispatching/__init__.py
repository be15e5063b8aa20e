"""Ops on distributed tensors: how they run, and the metadata of their results."""
