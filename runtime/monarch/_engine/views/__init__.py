"""How distributed tensors are shown in a notebook, and how much memory they hold."""
