"""Pauses, breakpoints and prompts, and the commands that look at ranks."""
