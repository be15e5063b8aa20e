"""Digests of values: whether two values are equal, and where arrays differ, without sending them."""
