"""The conformance suite for backends, ours and foreign: `rulec.testing.check_backend`."""

from __future__ import annotations

from rulec.testing.conformance import Report, check_backend
from rulec.testing.kinds import IEEE, MLX, XLA, ArrayKind, CupyKind, JaxKind, MlxKind, Numerics, NumpyKind, TorchKind

__all__ = [
    "IEEE", "MLX", "XLA", "ArrayKind", "CupyKind", "JaxKind", "MlxKind", "Numerics", "NumpyKind", "Report", "TorchKind",
    "check_backend",
]  # fmt: skip
