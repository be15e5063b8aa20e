"""Everything built on torch: process groups, memory for one-sided transfers, and checkpoint files."""
