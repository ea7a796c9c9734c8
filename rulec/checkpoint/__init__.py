"""Checkpoints for every framework: one safetensors file with the states of a rule, and their parameters' names.

An adapter describes its optimizer as a `Run`, and `save` and `load` do everything else. No framework is imported here.
"""

from __future__ import annotations

from rulec.checkpoint.content import Checkpoint, Leaf, Parameter, Run, Shared, meaning, save, write
from rulec.checkpoint.loading import Axes, Loaded, Names, load, load_values
from rulec.checkpoint.reading import read
from rulec.checkpoint.tensors import Stored

__all__ = [
    "Axes", "Checkpoint", "Leaf", "Loaded", "Names", "Parameter", "Run", "Shared", "Stored", "load", "load_values",
    "meaning", "read", "save", "write",
]  # fmt: skip
