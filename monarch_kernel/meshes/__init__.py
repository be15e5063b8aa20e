"""The meshes of a notebook, and what it knows of each: recipe, hosts, definitions, deaths and variables."""
