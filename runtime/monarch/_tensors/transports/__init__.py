"""Ways to move bytes between processes; one file for each transport."""
