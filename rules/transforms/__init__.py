"""Rules that exist to be composed with others, such as decay, clip and l2."""
