"""Processes: host agents, zygotes, the fork server, and the process side of a rank."""
