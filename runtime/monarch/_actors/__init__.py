"""Actors and meshes: what the public modules show."""
