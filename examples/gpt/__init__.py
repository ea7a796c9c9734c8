"""A GPT, trained on the sources of Python's standard library with optimizers of torch, optax and rulec."""
