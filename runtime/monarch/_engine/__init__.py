"""Distributed tensors: the program computes on metadata, the ranks on their shards of DTensors."""
