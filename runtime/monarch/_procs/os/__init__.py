"""Thin wrappers over Linux."""
