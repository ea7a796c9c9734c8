"""Steps as pure functions of arrays, for frameworks whose arrays are never written: JAX and MLX.

An adapter gives a tree's leaves and a library of its arrays, and puts the results in the containers of its users.
"""
