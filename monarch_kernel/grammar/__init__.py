"""The text of ``%mesh`` lines and of the first lines of ``%%mesh`` cells: what it may say, and the help for it."""
