"""The fork server, zygotes and what a fork goes through."""
