"""Meshes of hosts, processes and actors."""
