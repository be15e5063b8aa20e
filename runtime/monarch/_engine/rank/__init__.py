"""The rank's side: parts of tensors, and the ops on them."""
