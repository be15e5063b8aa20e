"""The replies to calls: collected, read as results or errors, and the credit that they return."""
