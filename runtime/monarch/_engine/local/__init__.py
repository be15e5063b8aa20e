"""Rank-local tensors: each rank has a plain tensor of its own, and the program one object for all of them."""
