"""Output of ranks in the notebook."""
