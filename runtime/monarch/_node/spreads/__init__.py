"""Messages to many hosts, which go from host to host, and are kept until they have arrived."""
