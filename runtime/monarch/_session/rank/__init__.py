"""The main program of a rank: its process, its output, and its last steps."""
