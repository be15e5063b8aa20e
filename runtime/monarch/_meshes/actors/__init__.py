"""Meshes of actors: spawning, calls, class updates."""
