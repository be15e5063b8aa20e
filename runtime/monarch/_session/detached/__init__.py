"""Detached meshes: processes and actors that outlive their program until another one of the same user attaches them."""
