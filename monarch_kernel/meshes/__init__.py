"""The meshes of a notebook."""
