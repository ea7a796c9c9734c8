"""Evolution strategies for PyTorch: all members of a population in one forward pass."""

from rulec.es.fitness import Report
from rulec.torch.es.binary import (
    BinaryConv2d,
    BinaryLinear,
    BinaryMaxPool2d,
    BinaryThreshold,
    pack_bits,
    unpack_bits,
)
from rulec.torch.es.strategy import Strategy, perturb

__all__ = [
    "BinaryConv2d", "BinaryLinear", "BinaryMaxPool2d", "BinaryThreshold", "Report", "Strategy", "pack_bits", "perturb",
    "unpack_bits",
]  # fmt: skip
