"""Evolution strategies: layers of a population, noise made in kernels, and how near estimates come."""
