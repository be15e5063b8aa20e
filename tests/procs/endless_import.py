"""A module whose import does not end."""

import signal

print("importing", flush=True)
while True:
    signal.pause()
