"""A cell on ranks: how it runs, and its outcome: results, errors with hints, Stop, handles and dry runs."""
