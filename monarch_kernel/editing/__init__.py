"""Edit and continue."""
