"""The allocations of a step, and the memory of training."""
