"""Every format with every trait, by its key, and the values between which codes change."""

from __future__ import annotations

import numpy as np

from rulec.formats import NAMES, Format, encode, parse

FORMATS: dict[str, Format] = {
    format.key: format
    for name in NAMES
    for signed in (True, False)
    for floor in (False, True)
    for format in [parse(name).for_state(signed=signed, floor=floor)]
}

#: Those that count thresholds.
DYNAMIC = {key: format for key, format in FORMATS.items() if format.name.startswith("dynamic") and not format.floor}


def one_by_one(format: Format, codes: np.ndarray) -> np.ndarray:
    """uint8: each code by itself."""
    bits = codes.reshape(-1).view(np.uint8)
    return bits if format.bits == 8 else np.stack([bits >> 4, bits & 15], -1).reshape(-1)


def edges(format: Format, scales: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """float32 in rows of eight, for blocks of eight: a scale, and seven values next to a change of the code.

    Of two neighbouring floats with different codes a value is one or the other, so arithmetic that rounds otherwise
    shows in some of them.
    """

    def codes(bits: np.ndarray) -> np.ndarray:
        rows = np.concatenate([scales[:, None], bits.view(np.float32)], axis=1)
        return one_by_one(format, encode(format, rows)[0]).reshape(rows.shape)[:, 1:].astype(np.int64)

    low, high = np.zeros((scales.size, 7), np.uint32), np.repeat(scales.view(np.uint32), 7).reshape(-1, 7)
    target = rng.integers(codes(low) + 1, codes(high), endpoint=True)
    for _ in range(32):
        middle = low + (high - low) // np.uint32(2)
        above = codes(middle) >= target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    assert (codes(low) < codes(high)).all()
    values = np.where(rng.random(low.shape) < 0.5, low, high).view(np.float32)
    return np.concatenate([scales[:, None], values], axis=1)
