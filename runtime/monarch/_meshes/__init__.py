"""Meshes of hosts, procs and actors, and the calls that are made on them."""
