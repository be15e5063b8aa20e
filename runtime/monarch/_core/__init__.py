"""Pure logic without I/O: shapes, rosters, flow control, state machines and text."""
