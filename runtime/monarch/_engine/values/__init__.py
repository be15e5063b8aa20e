"""Values of the program that become tensors of a mesh: tensors, and arrays of numpy, Arrow and others."""
