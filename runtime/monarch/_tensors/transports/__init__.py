"""Ways to move bytes between processes; one file a transport."""
