"""A module that raises when it is imported."""

raise RuntimeError("cannot be imported")
