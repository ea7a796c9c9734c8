"""Evolution strategies for JAX: pure functions over a tree of parameters."""
