"""How tensors of a mesh are shown in a notebook, and how much memory they hold."""
