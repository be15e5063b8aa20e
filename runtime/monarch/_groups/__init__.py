"""Process groups of meshes: rendezvous, membership, torchrun."""
