"""Edit and continue: definitions that changed in the notebook after ranks or actors got them."""
