"""The events of a mesh, and its state as a pure function of them."""
