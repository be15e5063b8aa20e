"""The text of ``%mesh`` lines and of the first lines of ``%%mesh`` cells: parsers and their help; no meshes."""
