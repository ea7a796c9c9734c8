"""The kernel as data: what a stage does to a tensor in memory, before any language is chosen to print it in."""
