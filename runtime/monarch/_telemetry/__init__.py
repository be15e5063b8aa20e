"""Usage, metrics and progress of ranks, and the events of meshes."""
