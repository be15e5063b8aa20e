"""The ways of messages to and from an agent: its connections, those of the program that it serves, and refusals."""
