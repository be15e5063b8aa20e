"""The debugger of a front end for the ranks: the Debug Adapter Protocol, beside ipykernel's own for the notebook."""
