"""Codes with a scale for each element: cut anywhere, they have the values of whole blocks."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.formats import NAMES, decode, decode_spread, encode, gathered, parse, spread


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_codes_that_are_cut_have_the_values_of_blocks(name: str, signed: bool) -> None:
    form = parse(f"{name}/32").for_state(signed=signed, floor=not signed)
    for count in (0, 1, 33, 1000):
        values = np.abs(np.random.default_rng(0).standard_normal(count)).astype(np.float32)
        values[500:501] = np.nan
        codes, scales = encode(form, values)
        each = spread(form, codes, scales, count)
        assert [x.shape for x in each] == [(count,), (count,)]
        for cut in (slice(None), slice(7, 70), slice(32, 96)):
            part = decode_spread(form, each[0][cut], each[1][cut])
            assert np.array_equal(part, decode(form, codes, scales, (count,))[cut], equal_nan=True)
        joined = gathered(form, *each)
        assert joined is not None
        assert joined[0].dtype == codes.dtype
        assert np.array_equal(joined[0], codes)
        assert np.array_equal(joined[1], scales, equal_nan=True)
    assert gathered(form, each[0][7:], each[1][7:]) is None
