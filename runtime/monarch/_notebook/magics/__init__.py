"""Magics and shell commands of cells on a rank, without IPython."""
