"""Copying a state between meshes."""
