"""Buffers that actors share one-sidedly."""
