"""Values on their way between the program and the ranks: tensors, and arrays of numpy, Arrow and others."""
