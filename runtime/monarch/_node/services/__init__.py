"""Functions that processes of a session call by name."""
