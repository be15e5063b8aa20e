"""A distributed tensor, as the program sees it."""
