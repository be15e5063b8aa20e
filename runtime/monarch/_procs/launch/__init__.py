"""Launchers, one file each, and their parts: interface, streams to hosts, packages there, agents of this machine."""
