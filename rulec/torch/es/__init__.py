"""Evolution strategies for PyTorch: all members of a population in one forward pass."""
