"""Pauses, breakpoints and prompts, and the verbs that look at ranks."""
