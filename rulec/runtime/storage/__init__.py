"""Storage of states in memory: options, allocation, quantized states."""
