"""The names in the namespace of a rank, by who has given them."""
