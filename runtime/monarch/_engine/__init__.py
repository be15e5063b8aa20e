"""Distributed tensors: the program computes on metadata, the ranks on their parts of DTensors."""
