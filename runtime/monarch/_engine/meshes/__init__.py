"""The program's side of a mesh of tensors, its recovery after failures, and its healing after deaths."""
