"""State of actors: one-sided buffers, copies, handoff, checkpoints and healing with state."""
