"""Recorded steps on a rank."""
