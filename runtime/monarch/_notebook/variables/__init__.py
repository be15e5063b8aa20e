"""Variables of cells: read, copied to other ranks, on disk, and inside of an actor."""
