"""Running a cell on a rank: its statements, marks of its lines, and the event loop of cells that await."""
