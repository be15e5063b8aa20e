"""Settings: those of this package, and the keys of torchmonarch's ``configure``."""
