"""Memory that is read and written one-sidedly."""
