"""Functions in printed Triton sources, beside NumPy's and SciPy's: elementary ones, and the one that joins slots."""

from __future__ import annotations

import pytest

from tests.backends.triton_process import check_in_interpreter, in_a_process

#: How many ulps each may be off, which is what the conformance suite allows all of them: 4, and less.
BOUNDS = {"exp": 1.1, "log": 1.0, "erf": 1.5, "sigmoid": 2.6, "tanh": 2.8, "cbrt": 1.1, "log1p": 1.0, "expm1": 1.5}

MEASURE = """
import json
import numpy as np
import scipy.special
import torch
from rulec_backends.common.text import run_source
from rulec_backends.triton.words import words_used

NAMES = ("exp", "log", "erf", "sigmoid", "tanh", "cbrt", "log1p", "expm1")
COUNT = 1 << 16
EXACT = {
    "exp": np.exp, "log": np.log, "erf": scipy.special.erf, "tanh": np.tanh, "cbrt": np.cbrt,
    "log1p": np.log1p, "expm1": np.expm1,
    "sigmoid": lambda x: np.where(x < 0, np.exp(-np.abs(x)), 1) / (1 + np.exp(-np.abs(x))),
}
kernels = "".join(f'''
@triton.jit
def run_{name}(x_at, y_at, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(y_at + i, {name}(tl.load(x_at + i)))
''' for name in NAMES)
head = "import triton\\nimport triton.language as tl\\n\\n\\n"
made = run_source("triton", "functions", head + "\\n\\n".join([*words_used(kernels), kernels]))
random = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38, 88.72, -103.97]

def numbers():
    yield random.integers(0, 1 << 32, COUNT, dtype=np.uint64).astype(np.uint32).view(np.float32)
    yield random.uniform(-110, 92, COUNT).astype(np.float32)
    x = random.uniform(-2, 2, COUNT).astype(np.float32)
    x[: len(SPECIAL)] = SPECIAL
    yield x

def worst(name):
    found = 0.0
    for x in numbers():
        y = torch.empty(COUNT)
        made[f"run_{name}"][(1,)](torch.from_numpy(x), y, COUNT=COUNT)
        got, want = y.numpy(), EXACT[name](x.astype(np.float64))
        assert (np.isnan(got) == np.isnan(want)).all(), name
        zero = want == 0
        assert (np.signbit(got[zero]) == np.signbit(want[zero])).all() and (got[zero] == 0).all(), name
        single = want.astype(np.float32)
        far = np.isinf(single)
        assert (got[far] == single[far]).all(), (name, x[far][got[far] != single[far]])
        rest = ~far & ~np.isnan(want) & np.isfinite(got)
        assert np.abs(want[~far & ~np.isnan(want) & ~np.isfinite(got)]).min(initial=np.inf) > 3.4e38, name
        size = np.maximum(np.abs(want[rest]), 2.0**-126)
        ulp = 2.0 ** (np.floor(np.log2(size)) - 23)
        found = max(found, float((np.abs(got[rest] - want[rest]) / ulp).max()))
    return found

with np.errstate(all="ignore"):
    print(json.dumps({name: worst(name) for name in NAMES}))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    found: dict[str, float] = in_a_process(MEASURE, TRITON_INTERPRET="1")
    return found


@pytest.mark.parametrize("name", BOUNDS)
def test_functions_of_float32_are_good_to_a_few_ulps(name: str, measured: dict[str, float]) -> None:
    """For numbers of all bit patterns, the special ones, and where the functions are neither 0 nor infinite."""
    assert measured[name] <= BOUNDS[name]


FINISH = """
import numpy as np
import torch
from rulec_backends.common.text import run_source
from rulec_backends.triton.words import source_text, words_used

LANES = 16
made = run_source("triton", "finish", source_text("Slots.", words_used("finish(")))
slots = np.random.default_rng(0).integers(-100, 100, 120).astype(np.float64)
slots[[40, 60, 73]] = 1e9, -1e9, 1e9  # neighbours of the slots that are joined
lines = [
    [0, 1, 0, 0, 3, LANES, 1, 40],
    [1, 1, 41, 1, 2, LANES, 1, 19],
    [2, 1, 61, 2, 1, LANES, 1, 12],
    [2, 0, 74, 3, 6, 7, 1, 7],
]
exact = [slots[:40].sum(), slots[41:60].min(), slots[61:73].max(), *slots[74:116].reshape(6, 7).max(0)]
results = torch.full((11,), torch.nan, dtype=torch.float64)
made["finish"][(4,)](torch.tensor(lines), torch.from_numpy(slots), results, LANES=LANES)
pairs = [results.tolist()[:10], [float(x) for x in exact], bool(results[10].isnan())]
"""


def test_slots_are_joined_to_one_result_or_side_by_side() -> None:
    joined, exact, is_last_untouched = check_in_interpreter(FINISH, "pairs")
    assert joined == exact
    assert is_last_untouched
