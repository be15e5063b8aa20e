"""How cells of a rank await."""
