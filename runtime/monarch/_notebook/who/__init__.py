"""The variables of a rank in short: for ``%mesh who``, while the rank may run a cell. No repr of a user class runs."""
