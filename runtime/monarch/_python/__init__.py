"""Access to Python itself: frames of threads, calls into them, owners of locks, a late asyncio."""
