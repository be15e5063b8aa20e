"""Ops that take another way than the stream."""
