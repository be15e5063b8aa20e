"""Cells of a notebook on a rank: the namespace they run in, what they show, how they are looked into."""
