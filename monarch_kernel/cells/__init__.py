"""The outcome of a cell on ranks: results, errors with hints, Stop, handles and dry runs."""
