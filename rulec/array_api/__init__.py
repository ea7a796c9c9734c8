"""Array libraries: the operations of the language once for NumPy, torch, JAX, CuPy and MLX.

`functions` has the functions that libraries name differently; `arithmetic`, `matrix` and `library` are built on them.
The differences of a library from NumPy are in its adapter.
"""
