"""Hosts of a launcher that outlive their program: a process holds them for the programs that come."""
