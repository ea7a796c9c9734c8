"""`rulec bench orthogonal`: how far Newton-Schulz in 16 bits is from its polynomials in float64, in both forms.

The exact result has the singular vectors of the matrix, and the polynomials of its singular values. The measured errors
are of what the library computes; other restarts and dtypes of the `gram` form are computed here beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch
from benchmarks.trained import gradients
from rulec.array_api.newton_schulz import factor
from rulec.language.expr.newton_schulz import coefficients_of
from rulec.language.expr.node import Op

Array = np.ndarray[Any, Any]

#: Square, and with one side two, four and eight times as long.
SHAPES, QUICK_SHAPES = ((128, 128), (128, 256), (96, 384), (768, 96)), ((32, 32), (32, 96))
CONDITIONS, QUICK_CONDITIONS = (1.0, 10.0, 1e2, 1e4, 1e6), (1.0, 1e4)
SCHEDULES, STEPS = ("muon", "quintic", "polar_express"), 5

#: The largest share of the error of Muon's own iteration in bfloat16 that is wanted of the `gram` form.
TARGET = 1.0

#: Name of a form -> its dtypes of the matrix and of the symmetric matrices, and the iterations between restarts. An
#: asterisk is for products of numbers rounded to 11 digits, as tensor cores take float32.
FORMS: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "restarts after 2 and 4, bfloat16": ("bfloat16", "bfloat16", (2, 2, 1)),
    "a restart after 2, bfloat16": ("bfloat16", "bfloat16", (2, 3)),
    "a restart after 2, float16": ("float16", "float16", (2, 3)),
    "a restart after 3, float16": ("float16", "float16", (3, 2)),
    "no restart, float16": ("float16", "float16", (5,)),
    "restarts after 2 and 4, Gram matrices in TF32": ("bfloat16", "float32*", (2, 2, 1)),
    "no restart, Gram matrices in TF32": ("bfloat16", "float32*", (5,)),
    "restarts after 2 and 4, Gram matrices in float32": ("bfloat16", "float32", (2, 2, 1)),
    "no restart, Gram matrices in float32": ("bfloat16", "float32", (5,)),
}  # fmt: skip

#: What the rows say.
FROBENIUS = "largest error, of that of Muon's own in bfloat16"
SPECTRAL = "the same in the spectral norm"


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `advance` is called after each schedule."""
    notes: list[str] = []
    rows: list[Row] = []
    if have_torch(notes):
        matrices = dict(cases(quick))
        for schedule in SCHEDULES:
            rows += of_schedule(schedule, matrices)
            advance()
    return Result("orthogonal", rows, quick, threads(), notes)


def of_schedule(schedule: str, matrices: Mapping[str, Array]) -> Iterator[Row]:
    """The errors of every form, of the library's `gram` form first."""
    direct = partial(by_library, form="direct")
    forms: dict[str, Callable[[Array, str], Array]] = {
        "the gram form": partial(by_library, form="gram"),
        **{f"gram, {name}": partial(by_form, form=form) for name, form in FORMS.items()},
    }
    exact = {name: polynomials(x, schedule) for name, x in matrices.items()}
    base = {name: apart(direct(x, schedule), exact[name]) for name, x in matrices.items()}
    for title, form in forms.items():
        errors = {name: apart(form(x, schedule), exact[name]) for name, x in matrices.items()}
        for k, said in enumerate((FROBENIUS, SPECTRAL)):
            shares = {name: _share(errors[name][k], base[name][k]) for name in matrices}
            worst = max(shares, key=lambda name: shares[name])
            detail = {"of": worst, "error": errors[worst][k], "Muon's own": base[worst][k],
                      "median share": float(np.median([*shares.values()]))}  # fmt: skip
            detail |= {"singular values": errors[worst][2:], "exact": list(_ends(exact[worst]))}
            target = TARGET if title == "the gram form" else None
            yield Row(f"{schedule}, {title}", said, shares[worst], target, "at most", detail=detail)


def _share(error: float, base: float) -> float:
    return error / base if math.isfinite(error) else math.inf


# Matrices


def cases(quick: bool) -> Iterator[tuple[str, Array]]:
    """Matrices by name, in float32: of every shape, spectrum and condition, and the gradients of a small model."""
    drawn = np.random.default_rng(0)
    shapes, conditions = (QUICK_SHAPES, QUICK_CONDITIONS) if quick else (SHAPES, CONDITIONS)
    for rows, cols in shapes:
        left, right = (np.linalg.qr(drawn.standard_normal((n, min(rows, cols))))[0] for n in (rows, cols))
        for name, spectrum in SPECTRA.items():
            for condition in conditions:
                values = spectrum(min(rows, cols), condition)
                title = f"{rows} by {cols}, {name}, condition {condition:g}"
                yield title, ((left * values) @ right.T).astype(np.float32)
    for number, gradient in enumerate(gradients(1 if quick else 20)):
        yield f"gradient {number} of a small model, {gradient.shape[0]} by {gradient.shape[1]}", gradient


def _few(count: int, condition: float) -> Array:
    return np.where(np.arange(count) < 4, 1.0, 1 / condition)


def _deficient(count: int, condition: float) -> Array:
    half = count // 2
    return np.concatenate([np.geomspace(1, 1 / condition, half), np.zeros(count - half)])


#: Name -> the singular values, from their count and the largest over the smallest.
SPECTRA: Mapping[str, Callable[[int, float], Array]] = {
    "uniform": lambda count, condition: np.linspace(1, 1 / condition, count),
    "geometric": lambda count, condition: np.geomspace(1, 1 / condition, count),
    "four large": _few,
    "half of them zero": _deficient,
}


# Results


def polynomials(x: Array, schedule: str) -> Array:
    """The exact result: the polynomials of the singular values, in float64."""
    left, values, right = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    values = values / np.linalg.norm(values)
    for a, b, c in coefficients_of(schedule, STEPS):
        values = a * values + b * values**3 + c * values**5
    result: Array = (left * values) @ right
    return result


def by_library(x: Array, schedule: str, form: str) -> Array:
    """What the library computes on a processor."""
    from rulec.torch.tensors.matrix import TORCH_MATRIX

    function = TORCH_MATRIX[Op.NEWTON_SCHULZ]
    result: Array = function(x[None], float(STEPS), "bfloat16", coefficients=schedule, form=form)[0]
    return result


def apart(result: Array, exact: Array) -> tuple[float, float, float, float]:
    """The relative error in the Frobenius norm, the spectral norm of the error, and the extreme singular values."""
    if not np.isfinite(result).all():
        return (math.inf,) * 4
    error = result.astype(np.float64) - exact
    relative = float(np.linalg.norm(error) / np.linalg.norm(exact))
    return relative, float(np.linalg.norm(error, 2)), *_ends(result)


def _ends(x: Array) -> tuple[float, float]:
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    return float(values.min()), float(values.max())


def by_form(x: Array, schedule: str, form: tuple[str, str, tuple[int, ...]]) -> Array:
    """The `gram` form with other dtypes and restarts; sums are in float32."""
    import torch

    wide, inner, blocks = form
    tall = x.shape[0] > x.shape[1]
    y = torch.from_numpy(x.T.copy() if tall else x).bfloat16().float()
    y = _rounded(y / y.norm().clamp(min=1e-7), wide)
    rest = coefficients_of(schedule, STEPS)
    for size in blocks:
        matrix, a, _ = factor(_rounded(y @ y.T, inner), rest[:size], _Rounding(inner))
        y, rest = _rounded(a * y + matrix @ y, wide), rest[size:]
    result: Array = (y.T if tall else y).bfloat16().float().numpy()
    return result


@dataclass(frozen=True)
class _Rounding:
    """Products of symmetric matrices in float32, rounded to a dtype; with an asterisk, of rounded factors."""

    dtype: str

    def polynomial(self, gram: Any, b: float, c: float, out: Any = None) -> Any:
        return _rounded(b * gram + c * self._factor(gram) @ self._factor(gram), self.dtype)

    def multiplied(self, x: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        return _rounded(a * x + self._factor(x) @ self._factor(polynomial), self.dtype)

    def shifted(self, x: Any, a: float) -> Any:
        import torch

        return _rounded(x + a * torch.eye(len(x)), self.dtype)

    def _factor(self, x: Any) -> Any:
        return _with_digits(x, 11) if self.dtype.endswith("*") else x


def _rounded(x: Any, dtype: str) -> Any:
    import torch

    return x.to(getattr(torch, dtype.rstrip("*"))).float()


def _with_digits(x: Any, digits: int) -> Any:
    """Numbers in float32, rounded to fewer binary digits."""
    import torch

    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(fraction * 2**digits) / 2**digits, exponent)
