"""Meshes of procs: starting, replacing, resizing."""
