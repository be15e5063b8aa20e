"""The device of a rank and its DeviceMeshes."""
