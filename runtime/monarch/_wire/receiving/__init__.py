"""The receive loop of a process: leadership, timers, wake-ups."""
