"""Pausing the code of a rank: the gate that holds it, breakpoints, steps, and the last error with its frames."""
