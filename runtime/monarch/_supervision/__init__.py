"""Failures: who decides about them, who is told, what is started again."""
