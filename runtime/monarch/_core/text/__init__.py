"""Text and tables for people: sentences from causes and findings, and equal lines of ranks folded into one."""
