"""Solving, Cholesky's factor, slices and the like: every array library beside NumPy's, and NumPy's beside algebra."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch

import rulec
from rulec.array_api.functions import Functions
from rulec.array_api.numpy import NUMPY_MATRIX
from rulec.array_api.selection import SHORT, quantile
from rulec.compiler.matrix import EXACT_MATRIX
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.expr.arithmetic import mpmath_context
from rulec.language.expr.functions import INTERPOLATIONS
from rulec.language.expr.newton_schulz import SCHEDULES, coefficients_of
from rulec.language.expr.node import Op
from rulec.language.expr.static import BLOCKWISE
from rulec.torch.tensors.matrix import TORCH_MATRIX

Array = np.ndarray[Any, Any]
DRAWN = np.random.default_rng(4)
X, B = DRAWN.normal(size=(3, 4, 4)), DRAWN.normal(size=(3, 4, 2))
#: The second has a zero on its diagonal, and the third no number.
SINGULAR = X.copy()
SINGULAR[1, 2, 2], SINGULAR[2, 0, 0] = 0, np.nan
SYMMETRIC = X @ X.swapaxes(1, 2) + np.eye(4) * [[[1.0]], [[-9.0]], [[2.0]]]

#: Matrices of four rows and two columns, each two symmetric matrices one below the other.
PAIRS_OF_ROWS = np.concatenate([SYMMETRIC[:2, :2, :2], SYMMETRIC[:2, 2:, 2:]], axis=1)[[0, 0, 1]]

#: Three tensors of four by three by two as matrices, and of each axis: its extent and the elements before and after
#: it, and a square matrix for each tensor.
TENSORS = DRAWN.normal(size=(3, 4, 6))
SIDES = {0: (4.0, 1.0, 6.0), 1: (3.0, 4.0, 2.0), 2: (2.0, 12.0, 1.0)}
SQUARES = {k: DRAWN.normal(size=(3, int(sides[0]), int(sides[0]))) for k, sides in SIDES.items()}

#: Vectors with equal values, the third with no number.
TIED = np.array([[4.0, 1.0, 4.0, 4.0], [2.0, -3.0, 7.0, 0.0], [5.0, np.nan, 1.0, np.inf]])[:, :, None]

#: Functions of blocks of two rows, for two matrices of four.
BLOCKS: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]] = (
    ("newton_schulz", (X[:, :, :3], 5), {"dtype": None, "form": "gram"}), ("qr", (B,), {}),
    ("inverse_root", (PAIRS_OF_ROWS, 4, 0.5), {}), ("cholesky", (PAIRS_OF_ROWS,), {}),
    ("matmul", (B, X[:1]), {}), ("transpose", (X[:, :, :3],), {}),
    ("solve", (PAIRS_OF_ROWS, X), {"kind": "lower"}), ("eigh", (PAIRS_OF_ROWS,), {}),
)  # fmt: skip

#: Longer than what is sorted: the rank of a long axis is bisected.
LONG = DRAWN.normal(size=(2, 1, SHORT + 9))
RANKED = np.concatenate([X, [[[np.inf, -np.inf, 1.0, -0.0]] * 4], SINGULAR[2:]])

CALLS: Mapping[str, tuple[Op, tuple[Any, ...], dict[str, Any]]] = {
    "diagonal": (Op.DIAG, (X,), {}), "of rows": (Op.DIAG, (X[:, :, :1],), {}), "of cols": (Op.DIAG, (X[:, :1],), {}),
    "largest of rows": (Op.TOPK, (TIED, 2), {}), "largest of cols": (Op.TOPK, (TIED.swapaxes(1, 2), 3), {}),
    **{f"quantile {q} per {per}": (Op.QUANTILE, (RANKED, q), {"per": per, "interpolation": way})
       for q, per, way in (
           (0.3, "row", "linear"), (0.75, "col", "lower"), (0.5, "matrix", "nearest"), (1.0, "tensor", "higher"),
           (0.1, "row", "midpoint"), (0.0, "col", "linear"), (1.5, "row", "linear"),
       )},
    "quantile of each": (Op.QUANTILE, (X, np.array([0.1, 0.5, 2.0]).reshape(3, 1, 1)), {"per": "matrix"}),
    "quantile of a long axis": (Op.QUANTILE, (LONG, 0.37), {"per": "row"}),
    "quantile of each long axis": (Op.QUANTILE, (LONG, np.array([0.9, 0.5]).reshape(2, 1, 1)), {"per": "row"}),
    "quantile of nothing": (Op.QUANTILE, (X[:, :0], 0.5), {"per": "col"}),
    "singular vectors of no columns": (Op.SINGULAR_VECTORS, (X[:, :, :0], 1), {}),
    "singular vectors of no rows": (Op.SINGULAR_VECTORS, (X[:, :0], 2), {}),
    "upper": (Op.TRIU, (B,), {}), "lower": (Op.TRIL, (X,), {}),
    "rows": (Op.SLICE, (X, 1.0, 3.0), {"axis": "rows"}), "cols": (Op.SLICE, (X, 1.0, np.inf), {"axis": "cols"}),
    "beside": (Op.CONCAT, (X, B), {"axis": 1}), "below one for all": (Op.CONCAT, (X, X[:1, :2]), {"axis": 0}),
    "cholesky": (Op.CHOLESKY, (SYMMETRIC,), {}), "solve": (Op.SOLVE, (X, B), {"kind": "full"}),
    "solve upper": (Op.SOLVE, (SINGULAR, B), {"kind": "upper"}),
    "solve lower": (Op.SOLVE, (SINGULAR, B), {"kind": "lower"}),
    **{f"along axis {k}": (Op.MODE_PRODUCT, (TENSORS, SQUARES[k], *SIDES[k]), {}) for k in (0, 1, 2)},
    **{f"gram of axis {k}": (Op.GRAM, (TENSORS, *SIDES[k]), {}) for k in (0, 1, 2)},
    **{f"newton_schulz {name}": (Op.NEWTON_SCHULZ, (X, 9), {"dtype": "float64", "coefficients": name})
       for name in SCHEDULES},
    "newton_schulz in its own dtype": (Op.NEWTON_SCHULZ, (X, 5), {"dtype": None}),
    "newton_schulz of more than the norm": (Op.NEWTON_SCHULZ, (X, 5), {"dtype": "float64", "normalize": 1.02}),
    **{f"newton_schulz over {word}": (Op.NEWTON_SCHULZ, (x, 4), {"dtype": "float64", "normalize": word, "form": form})
       for word, x, form in (("aol", X[:, :3], "direct"), (("aol", 1.02), X, "direct"), ("schatten", B, "direct"),
                             ("aol", B, "gram"), ("spectral_bound", B, "direct"),
                             (("spectral_bound", 1.02), X[:, :3], "gram"))},
    "newton_schulz by Gram matrices": (Op.NEWTON_SCHULZ, (B, 5), {"dtype": "float64", "form": "gram"}),
    "newton_schulz undivided, by Gram matrices": (
        Op.NEWTON_SCHULZ, (B/9, 4), {"dtype": None, "normalize": "none", "form": "gram"},
    ),
    "newton_schulz undivided": (Op.NEWTON_SCHULZ, (X/9, 5), {"dtype": None, "normalize": "none"}),
    **{f"{name} of blocks": (Op.IN_BLOCKS, (*args, 2.0), {"function": name, **keywords})
       for name, args, keywords in BLOCKS},
}  # fmt: skip


def _torch(op: Op, args: tuple[Any, ...], keywords: dict[str, Any]) -> Array:
    from rulec.torch.tensors.library import DEVICE_MATRIX

    given = [torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for x in args]
    return np.asarray(DEVICE_MATRIX[op](*given, **keywords).numpy())


def _jax(op: Op, args: tuple[Any, ...], keywords: dict[str, Any]) -> Array:
    from rulec.jax.library import MATRIX

    with jax.enable_x64(True):
        return np.asarray(
            MATRIX[op](*(jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in args), **keywords)
        )


def _mlx(op: Op, args: tuple[Any, ...], keywords: dict[str, Any]) -> Array:
    mx = pytest.importorskip("mlx.core")
    from rulec.mlx.arrays import MlxLibrary

    with mx.stream(mx.cpu):
        given = [mx.array(x, dtype=mx.float64) if isinstance(x, np.ndarray) else x for x in args]
        return np.array(MlxLibrary.matrix[op](*given, **keywords))


LIBRARIES: Mapping[str, Callable[..., Array]] = {"torch": _torch, "jax": _jax, "mlx": _mlx}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_agree_with_numpy(library: str, call: str) -> None:
    op, args, keywords = CALLS[call]
    with np.errstate(all="ignore"):
        wanted = NUMPY_MATRIX[op](*args, **keywords)
        found = LIBRARIES[library](op, args, keywords)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "args", "keywords"), BLOCKS, ids=[name for name, *_ in BLOCKS])
def test_a_function_of_blocks_is_that_of_each_block(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Blocks of a second matrix are as many as those of the first."""
    whole = [np.broadcast_to(x, (3, *x.shape[1:])) if isinstance(x, np.ndarray) else x for x in args]
    upper, lower = ([x[:, rows] if isinstance(x, np.ndarray) else x for x in whole] for rows in (slice(2), slice(2, 4)))
    of_one = NUMPY_MATRIX[BLOCKWISE[name]]
    wanted = np.concatenate([of_one(*upper, **keywords), of_one(*lower, **keywords)], axis=1)
    for table in (NUMPY_MATRIX, TORCH_MATRIX):
        np.testing.assert_allclose(table[Op.IN_BLOCKS](*args, 2.0, function=name, **keywords), wanted, atol=1e-12)


#: The reference computes tensor by tensor: no number of it differs between the matrices of a stack.
OF_ONE = [call for call, (op, args, _) in CALLS.items() if op is not Op.QUANTILE or np.size(args[1]) == 1]


@pytest.mark.parametrize("call", OF_ONE)
def test_fifty_digits_agree_with_numpy(call: str) -> None:
    op, args, keywords = CALLS[call]
    to_exact = np.frompyfunc(mpmath_context().mpf, 1, 1)
    keywords = {key: value for key, value in keywords.items() if key != "dtype"}
    with np.errstate(all="ignore"):
        given = [to_exact(x) if isinstance(x, np.ndarray) else x for x in args]
        np.testing.assert_allclose(
            EXACT_MATRIX[op](*given, **keywords).astype(float),
            NUMPY_MATRIX[op](*args, **keywords),
            rtol=1e-11,
            atol=1e-12,
        )


@pytest.mark.parametrize("way", INTERPOLATIONS)
def test_a_quantile_is_numpys_and_torchs(way: str) -> None:
    """Of float32 too: of elements alone it is one of them, with the bits of NumPy's own selection."""
    numbers = np.concatenate([LONG[0, 0], [1e-42, -1e-42, 0.0, -0.0, 1.0, 1.0]])
    for dtype, count in (("float32", 5), ("float32", None), ("float64", None)):
        x = numbers[:count].astype(dtype)
        for q in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
            found = NUMPY_MATRIX[Op.QUANTILE](x[None, None], q, interpolation=way).item()
            np.testing.assert_array_equal(found, quantile(Functions(np), x[None, None], q, interpolation=way).item())
            near = {"rtol": 1e-5 if dtype == "float32" else 1e-13, "atol": 1e-37}
            np.testing.assert_allclose(found, np.quantile(x.astype("float64"), q, method=way), **near)  # type: ignore[call-overload]
            np.testing.assert_allclose(found, torch.quantile(torch.from_numpy(x), q, interpolation=way).item(), **near)
            assert way in ("linear", "midpoint") or found in x


def test_a_quantile_between_infinite_and_the_largest_numbers() -> None:
    def of(*values: float, q: float = 0.75) -> float:
        return float(NUMPY_MATRIX[Op.QUANTILE](np.array([[values]], np.float32), q).item())

    assert of(1, np.inf) == np.inf
    assert of(-np.inf, 1) == -np.inf
    assert of(np.inf, np.inf) == np.inf
    assert np.isnan(of(-np.inf, np.inf))
    assert of(-3e38, 3e38) == pytest.approx(1.5e38)
    assert np.isnan([of(1, 2, q=q) for q in (-0.1, 1.1, np.nan)] + [of(np.nan, 1, 2, q=0)]).all()
    assert not np.signbit(of(-0.0, -0.0))


def test_a_quantile_has_no_largest_number_of_elements() -> None:
    """torch.quantile refuses more than 2**24: the bisection of a rank does not copy them."""
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(torch.zeros(1).expand((1 << 24) + 1), 0.5)
    x = np.broadcast_to(np.arange(4096, dtype=np.float32), (1, 4097, 4096))
    assert NUMPY_MATRIX[Op.QUANTILE](x, 0.5).item() == 2047.5


@pytest.mark.parametrize("axis", SIDES)
def test_products_along_an_axis_are_contractions(axis: int) -> None:
    tensors, rest = TENSORS.reshape(3, 4, 3, 2), [k for k in range(3) if k != axis]
    for one, square, product, gram in zip(
        tensors, SQUARES[axis], NUMPY_MATRIX[Op.MODE_PRODUCT](TENSORS, SQUARES[axis], *SIDES[axis]),
        NUMPY_MATRIX[Op.GRAM](TENSORS, *SIDES[axis]), strict=True,
    ):  # fmt: skip
        wanted = np.moveaxis(np.tensordot(one, square, (axis, 0)), -1, axis)
        np.testing.assert_allclose(product.reshape(4, 3, 2), wanted, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(gram, np.tensordot(one, one, (rest, rest)), rtol=1e-13, atol=1e-13)


def test_the_largest_values_are_torchs_and_of_equal_ones_the_first() -> None:
    found = NUMPY_MATRIX[Op.TOPK](X[:, :1], 2)
    for marks, values in zip(found, X[:, :1], strict=True):
        chosen = torch.topk(torch.from_numpy(values[0]), 2).indices.numpy()
        np.testing.assert_array_equal(np.flatnonzero(marks), np.sort(chosen))
    wanted = [[1, 0, 1, 0], [1, 0, 1, 0], [1, np.nan, 0, 1]]
    np.testing.assert_array_equal(NUMPY_MATRIX[Op.TOPK](TIED, 2)[..., 0], wanted)
    assert (NUMPY_MATRIX[Op.TOPK](X[:, :1], 9) == 1).all()


@pytest.mark.parametrize("kind", ["full", "upper", "lower"])
def test_a_solution_solves(kind: str) -> None:
    a = {"full": X, "upper": np.triu(X), "lower": np.tril(X)}[kind]
    found = NUMPY_MATRIX[Op.SOLVE](X, B, kind=kind)
    np.testing.assert_allclose(a @ found, B, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "upper", "lower"])
def test_a_singular_matrix_has_no_number_and_its_neighbours_have(kind: str) -> None:
    a = SINGULAR.copy()
    a[1] = np.diag([1.0, 2.0, 0.0, 4.0])
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="raise"))
        found = NUMPY_MATRIX[Op.SOLVE](a, B, kind=kind)
    assert np.isnan(found[1:]).all()
    assert np.isfinite(found[0]).all()


def test_choleskys_factor_is_numpys() -> None:
    found = NUMPY_MATRIX[Op.CHOLESKY](SYMMETRIC)
    for i in (0, 2):
        np.testing.assert_allclose(found[i], np.linalg.cholesky(SYMMETRIC[i]), atol=1e-13)
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("name", ["cubic", "taylor", "polar_express", "polar_express_safe", "polar_express_safer"])
def test_schedules_that_converge_end_at_the_nearest_orthogonal_matrix(name: str) -> None:
    left, _, right = np.linalg.svd(X)
    found = NUMPY_MATRIX[Op.NEWTON_SCHULZ](X, 40, coefficients=name)
    np.testing.assert_allclose(found, left @ right, atol=1e-6)


def test_polar_express_has_the_papers_numbers() -> None:
    """Its error bound: from 1e-3 on, the polynomials take every singular value to within 1e-5 of 1 in seven steps."""
    x = np.geomspace(1e-3, 1, 2001)
    for a, b, c in coefficients_of("polar_express", 8):
        x = a * x + b * x**3 + c * x**5
    assert np.abs(x - 1).max() < 1e-5


#: The five rows of modded-nanogpt's training script.
MODDED = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


@pytest.mark.parametrize(
    ("written", "eps"),
    [
        ('g, coefficients="modded_nanogpt", normalize=1.02', 0.0),
        ('g/(1.02*norm(g, per="matrix") + 1e-2), coefficients="modded_nanogpt", normalize="none"', 1e-2),
    ],
)
def test_modded_nanogpts_iteration_can_be_written(written: str, eps: float) -> None:
    """Its matrix is divided by a little more than the norm, to which it may add a number."""
    y = X / (1.02 * np.linalg.norm(X, axis=(1, 2), keepdims=True) + eps)
    for a, b, c in MODDED:
        gram = y @ y.swapaxes(1, 2)
        y = a * y + (b * gram + c * gram @ gram) @ y
    rule = rulec.parse(f"name: Modded\nstep: |\n  direction = newton_schulz({written})\n")
    ours = ReferenceOptimizer(rule, [np.zeros_like(X)], {"lr": 1})
    ours.step([X])
    np.testing.assert_allclose(ours.params[0], -y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float64", 1e-14)])
def test_the_iteration_is_as_exact_as_its_matrix(backend: str, dtype: str, most: float) -> None:
    """Where a rule names no dtype; one that names float32 rounds to it."""
    apart = []
    for named in ("", ', dtype="float32"'):
        rule = rulec.parse(f"name: Own\nstep: |\n  direction = newton_schulz(g{named})\n")
        reference = ReferenceOptimizer(rule, [np.zeros_like(X)], {"lr": 1})
        param = np.zeros_like(X, dtype=dtype)
        reference.step([X])
        rulec.array.Optimizer(rule, [param], lr=1, backend=backend).step([X.astype(dtype)])
        apart.append(np.abs(param - reference.params[0]).max())
    assert apart[0] < most
    assert 1e-9 < apart[1] < 1e-5


def test_the_peers_schedules_are_ours() -> None:
    from pytorch_optimizer.optimizer.utils.matrix import NS_COEFFICIENTS, zero_power_via_newton_schulz_5

    names = {"original": "muon", "quintic": "quintic", "polar_express": "polar_express_safe"}
    names["polar_express_safer"] = "polar_express_safer"
    assert names.keys() == NS_COEFFICIENTS.keys()
    for theirs, ours in names.items():
        found = NUMPY_MATRIX[Op.NEWTON_SCHULZ](X, 7, coefficients=ours)
        for i in range(len(X)):
            wanted = zero_power_via_newton_schulz_5(torch.from_numpy(X[i]), 7, weights=theirs, dtype=torch.float64)
            np.testing.assert_allclose(found[i], wanted.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 9), (7, 4)])
@pytest.mark.parametrize("word", ["aol", "schatten", "spectral_bound"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_bound_leaves_no_singular_value_above_1(word: str, shape: tuple[int, int], scale: float) -> None:
    """The formula of each bound by NumPy alone, for a matrix of any size; times a number, that number smaller."""
    x = DRAWN.normal(size=(1, *shape)) * scale
    wide = x[0] if shape[0] < shape[1] else x[0].T
    squares = {
        "aol": np.abs(wide @ wide.T).sum(1, keepdims=True), "schatten": np.linalg.norm(wide @ wide.T),
        "spectral_bound": np.linalg.norm(wide, 1) * np.linalg.norm(wide, np.inf),
    }  # fmt: skip
    wanted = wide / np.sqrt(squares[word])
    found, smaller = (
        NUMPY_MATRIX[Op.NEWTON_SCHULZ](x, 0, normalize=normalize)[0] for normalize in (word, (word, 1.25))
    )
    np.testing.assert_allclose(found if shape[0] < shape[1] else found.T, wanted, rtol=1e-12)
    np.testing.assert_allclose(1.25 * smaller, found, rtol=1e-12)
    assert np.linalg.norm(found, 2) <= 1 + 1e-12


@pytest.mark.parametrize(("word", "theirs"), [("norm", "frobenius"), ("aol", "aol"), ("schatten", "schatten")])
def test_bounds_are_optaxs(word: str, theirs: str) -> None:
    from optax.contrib import _muon

    with jax.enable_x64(True):
        wanted = _muon.orthogonalize_via_newton_schulz(
            jax.numpy.asarray(X[0, :3]), jax.numpy.asarray(SCHEDULES["muon"][0]), 5, theirs, 0.0
        )
    np.testing.assert_allclose(NUMPY_MATRIX[Op.NEWTON_SCHULZ](X[:1, :3], 5, normalize=word)[0], wanted, atol=1e-12)


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("word", ["aol", "schatten", "spectral_bound"])
def test_bounds_of_narrow_matrices_are_near(word: str, form: str) -> None:
    x = DRAWN.normal(size=(2, 6, 24)).astype(np.float32)
    wide = NUMPY_MATRIX[Op.NEWTON_SCHULZ](x.astype(np.float64), 4, normalize=word)
    for function in (
        TORCH_MATRIX[Op.NEWTON_SCHULZ],
        lambda x, *rest, **keywords: _torch(Op.NEWTON_SCHULZ, (x, *rest), keywords),
    ):
        found = function(x, 4, dtype="bfloat16", normalize=word, form=form)
        assert np.abs(found - wide).max() < 2.0**-5
