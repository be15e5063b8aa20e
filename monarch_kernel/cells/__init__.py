"""Cells that run on ranks."""
