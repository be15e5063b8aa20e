"""Jobs in the form of torchmonarch, on those of this package."""
