"""Starting host agents; one file a launcher."""
