"""Output of ranks in the notebook: what they print, display and return, errors of cells, lines about waits, the log."""
