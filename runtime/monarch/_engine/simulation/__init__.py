"""Programs on tensors of a mesh without devices: memory, collectives and time of a step."""
