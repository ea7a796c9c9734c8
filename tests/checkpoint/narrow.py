"""A run of AdamW on one bfloat16 parameter, for files of numbers in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

import rulec.array.checkpoint as of_arrays
from rulec.array import Optimizer

BRAIN = np.dtype(ml_dtypes.bfloat16)
SHAPE = (12, 20)
_DRAWS = np.random.default_rng(4)
FIRST = _DRAWS.standard_normal(SHAPE).astype(BRAIN)
GRADS = [_DRAWS.standard_normal(SHAPE).astype(BRAIN) for _ in range(9)]


def tensor(array: Any) -> torch.Tensor:
    """A bfloat16 array as torch's."""
    return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)


def in_arrays(params: Any, grads: Any, file: Path | None = None, **words: Any) -> Optimizer:
    """An optimizer of arrays after these steps, that began with a file or anew."""
    optimizer = Optimizer("adamw", params, "cpu", **words)
    if file is not None:
        of_arrays.load(optimizer, file, parameters=True)
    for grad in grads:
        optimizer.step({"w": grad})
    return optimizer
