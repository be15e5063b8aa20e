"""What a rank process does beside its actors."""
