"""Process groups of meshes: rendezvous, groups of axes and slices, and programs written for torchrun."""
