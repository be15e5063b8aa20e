"""The %mesh and %%mesh magics."""
