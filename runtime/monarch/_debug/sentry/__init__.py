"""The divergence sentry: ranks send fingerprints of what they train, and their program compares them."""
