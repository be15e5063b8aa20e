"""The waits of a rank's code, and asking all ranks of a mesh for theirs."""
