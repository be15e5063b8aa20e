"""Notebook cells on a rank: their namespace, output and inspection."""
