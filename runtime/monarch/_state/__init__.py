"""State of actors: buffers, copies, transfers and checkpoints."""
