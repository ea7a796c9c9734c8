"""What a torch tensor is to the runtime: memory, arithmetic, DTensors, fake tensors, products."""
