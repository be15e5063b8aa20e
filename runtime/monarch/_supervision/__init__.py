"""Failures: deaths and faults, supervisors, restarts, healing and fail-fast."""
