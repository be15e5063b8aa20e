"""Decisions without I/O: shapes, ids, messages, gathering, flow control, folding."""
