"""The seed of random numbers, those of a rule and those of perturbations: one word of their generator's key."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.errors import HyperError


def checked_seed(seed: Any) -> int:
    """The seed as Python's own number; HyperError where it is none of the 2**32 that there are."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise HyperError(f"seed={seed!r} must be a whole number from 0 to 2**32 - 1")
    return int(seed)
