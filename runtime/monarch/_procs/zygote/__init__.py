"""The fork server, zygotes and the start of forks."""
