"""Process meshes: starting, replacing, resizing."""
