"""What NumPy, torch, JAX and CuPy differ in as arrays, and what is written once above it.

`functions` has what a library may call otherwise than NumPy does; `arithmetic`, `matrix` and `library` are made of it.
What another library than NumPy differs in lies in its adapter.
"""
