"""Torch tensors as the runtime sees them: memory, arithmetic, DTensors, fake tensors, products."""
