"""The library of JAX's arrays, and expressions evaluated on them."""

from __future__ import annotations

from rulec.jax.library import JaxLibrary

LIBRARY = JaxLibrary()
evaluated = LIBRARY.evaluated
