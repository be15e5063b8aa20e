"""State transfer within a mesh."""
