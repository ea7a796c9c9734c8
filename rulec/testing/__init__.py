"""The conformance suite for backends, ours and foreign: `rulec.testing.check_backend`."""

from __future__ import annotations

from rulec.testing.conformance import Report, check_backend
from rulec.testing.kinds import ArrayKind, CupyKind, JaxKind, MlxKind, NumpyKind, TorchKind
from rulec.testing.numerics import IEEE, MLX, XLA, Numerics

__all__ = [
    "IEEE", "MLX", "XLA", "ArrayKind", "CupyKind", "JaxKind", "MlxKind", "Numerics", "NumpyKind", "Report", "TorchKind",
    "check_backend",
]  # fmt: skip
