"""Evolution strategies: layers of a population, noise made in kernels, and estimates beside the gradient."""
