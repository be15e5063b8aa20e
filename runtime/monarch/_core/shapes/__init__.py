"""Extents, regions, ranks and values of meshes."""
