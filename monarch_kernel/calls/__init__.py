"""Calls to ranks that have not ended, those of cells included: named, awaited, and stopped."""
