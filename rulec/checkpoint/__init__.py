"""Checkpoints that every framework reads: one safetensors file with the states of a rule and what they belong to.

`rulec.torch`, `rulec.jax` and `rulec.array` save and load them; nothing here imports a framework.
"""

from __future__ import annotations

from rulec.checkpoint.content import Checkpoint, Parameter, write
from rulec.checkpoint.match import Own, matched
from rulec.checkpoint.meaning import meaning
from rulec.checkpoint.reading import read
from rulec.checkpoint.tensors import Stored

__all__ = ["Checkpoint", "Own", "Parameter", "Stored", "matched", "meaning", "read", "write"]
