"""Sessions: the program's side, the main program of a rank, output, workers and detached meshes."""
