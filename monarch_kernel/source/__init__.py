"""The text of notebook cells: its Python, its lines in the front end, and its definitions."""
