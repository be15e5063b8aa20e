"""ZeroMQ and shared memory: frames, codec, sockets, keys, bulk buffers."""
