"""Looking at the code of a rank while it is paused or runs: expressions, variables, differences, statements."""
