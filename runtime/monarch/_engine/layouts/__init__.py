"""Metadata of tensors in the program: shapes, sharding specs and placements."""
