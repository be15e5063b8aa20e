"""Memory that actors share: buffers, transfers of many at once, and state that goes to whole meshes."""
