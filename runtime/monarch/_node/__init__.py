"""One process in a session: its peers, ports, futures, services and errors."""
