"""Text and tables for people."""
