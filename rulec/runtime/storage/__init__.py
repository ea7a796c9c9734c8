"""How states lie in memory: options, allocation, quantized states."""
