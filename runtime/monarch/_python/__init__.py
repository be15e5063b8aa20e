"""Access to Python itself: frames of threads, calls into them, their registry, owners of locks, a late asyncio."""
