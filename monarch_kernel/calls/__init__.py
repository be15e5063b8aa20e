"""Calls to ranks that have not ended, those of cells included: sent, named, awaited and interrupted."""
