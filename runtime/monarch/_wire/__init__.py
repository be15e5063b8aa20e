"""The control plane: messages, pickling, sockets, keys, shared memory and the receive loop."""
