"""Jobs: hosts that a program gets, keeps and gives back by one object."""
