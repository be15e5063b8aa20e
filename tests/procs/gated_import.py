"""A module whose import ends when a file is there."""

import os
import time

print("warming", flush=True)
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.005)
