"""Why ranks wait: what each rank does, and what that means for the others."""
