"""What a rank does, reported while it is busy: its line, thread state, memory and device."""
