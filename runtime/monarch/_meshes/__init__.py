"""Meshes of hosts, processes and actors, and calls to them."""
