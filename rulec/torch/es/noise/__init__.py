"""The noise of evolution strategies for torch: families, draws, kernels that make it."""
