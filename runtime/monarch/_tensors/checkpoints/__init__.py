"""Checkpoint files: the states of models and optimizers, written and read by each rank in parts."""
