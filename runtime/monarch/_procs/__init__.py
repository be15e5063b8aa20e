"""Processes: zygote, host agent, leases, output capture, the message node of a process."""
