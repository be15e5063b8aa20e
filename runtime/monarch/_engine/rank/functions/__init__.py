"""Functions of the program on a rank, which a Stop may interrupt."""
