"""A program's session: its hosts, agents, output and detached meshes."""
