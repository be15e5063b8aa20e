"""The rank's side: shards of tensors, and the ops on them."""
