"""Live views of meshes: widgets in the notebook, the Meshes panel, and tables in a terminal."""
