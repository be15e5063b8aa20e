"""Tensors between ranks: process groups, and memory that others read and write one-sidedly."""
