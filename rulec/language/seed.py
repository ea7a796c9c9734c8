"""The seed of random numbers in rules and perturbations: one word of the generator's key."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.errors import HyperError


def checked_seed(seed: Any) -> int:
    """The seed as an int; HyperError where it is not a whole number from 0 to 2**32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise HyperError(f"seed={seed!r} must be a whole number from 0 to 2**32 - 1")
    return int(seed)
