"""The host agent: children, output backlog, detached meshes; ``routes`` has the ways of its messages."""
