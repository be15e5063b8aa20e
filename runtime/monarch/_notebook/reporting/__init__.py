"""State of a rank, reported while it is busy: its line, threads, memory and device."""
