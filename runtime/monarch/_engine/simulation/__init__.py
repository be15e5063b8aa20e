"""Programs on distributed tensors without devices: memory, collectives and time of a step."""
