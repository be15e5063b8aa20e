"""The process side of a rank: its output, the line of its cell, programs that it has started, and its end."""
