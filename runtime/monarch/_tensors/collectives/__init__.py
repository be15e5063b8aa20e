"""Process groups and their connections."""
