"""The process side of a rank."""
