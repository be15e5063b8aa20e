"""Libraries and calls that need another way on a rank than in a notebook."""
