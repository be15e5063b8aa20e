"""The ops of the program on a rank, in order."""
