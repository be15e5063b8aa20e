"""Steps that are recorded once, and from then on are one message to the ranks for each call."""
