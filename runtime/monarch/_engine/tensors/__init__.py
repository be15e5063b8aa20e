"""A tensor of a mesh, as the program sees it."""
