"""The host agent: children, routing, output backlog, detached meshes."""
