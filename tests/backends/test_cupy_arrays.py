"""`rulec.array.Optimizer` with CuPy arrays, by the kernels' own text on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.array.cupy import CupyLibrary, arithmetic
from rulec.array_api.numpy import NumpyLibrary
from rulec.backend import registry
from rulec.errors import StateMismatch, TensorError
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op
from rulec.language.expr.ops import SPECS
from rulec.testing.cases import SPECIAL
from rulec_backends.cupy import CupyBackend
from tests.backends import cuda_stand_in

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")

SHAPES = ((33, 12), (7,), (), (4, 3, 5), (12, 12))

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy's stand-in, and the backend with few threads in a block."""
    small = CupyBackend(threads=64)
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda name: small if name == "cupy" else get(name))
    with cuda_stand_in.installed() as module:
        yield module
        cuda_stand_in.flush()


def start(dtype: str = "float64", seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [np.asarray(random.standard_normal(shape), dtype) for shape in SHAPES]


def tenth(dtype: str = "float64", seed: int = 0) -> list[Array]:
    """Gradients: numbers of a tenth the size."""
    return [np.asarray(p * 0.1, dtype) for p in start(dtype, seed)]


class Pair:
    """The same rule on CuPy arrays and, by the numpy backend, on NumPy's."""

    def __init__(self, cupy: Any, rule: str, dtype: str = "float64", **more: Any) -> None:
        self.cupy = cupy
        self.ours, self.theirs = [cupy.asarray(p) for p in start(dtype)], start(dtype)
        self.gpu = Optimizer(rule, self.ours, **more)
        self.cpu = Optimizer(rule, self.theirs, backend="numpy", **more)
        self.dtype = dtype

    def step(self, seed: int, leave: int | None = None) -> None:
        grads: list[Any] = tenth(self.dtype, seed + 1)
        if leave is not None:
            grads[leave] = None
        self.gpu.step([None if g is None else self.cupy.asarray(g) for g in grads])
        self.cpu.step(grads)

    def check(self, tolerance: float = 1e-12) -> None:
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            np.testing.assert_allclose(ours.get(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", ["adamw", "adafactor", "lamb", "prodigy", "rprop", "nadam", "asgd"])
def test_steps_are_those_of_numpy(cupy: Any, rule: str) -> None:
    pair = Pair(cupy, rule)
    for seed in range(4):
        pair.step(seed, leave=1 if seed == 2 else None)
    pair.check()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(cupy: Any, dtype: str) -> None:
    pair = Pair(cupy, "adamw", dtype, state_dtype="float32")
    for seed in range(3):
        pair.step(seed)
    pair.check(1e-5 if dtype == "float32" else 2e-3)


def test_a_step_that_is_skipped_leaves_everything_as_it_was(cupy: Any) -> None:
    rule = rulec.load("adamw") + rulec.load("transforms/skip_not_finite")
    params = [cupy.asarray(p) for p in start()]
    optimizer = Optimizer(rule, params)
    optimizer.step([cupy.asarray(g) for g in start(seed=1)])
    before = [p.get() for p in params]
    state = {n: {k: np.array(v) for k, v in own.items()} for n, own in optimizer.state_dict()["state"].items()}
    bad = start(seed=2)
    for g in bad:
        g.reshape(-1)[0] = np.nan
    optimizer.step([cupy.asarray(g) for g in bad])
    assert all((a == p.get()).all() for a, p in zip(before, params, strict=True))
    after = optimizer.state_dict()["state"]
    assert all((v == after[n][k]).all() for n, own in state.items() for k, v in own.items())


def test_fortran_order_and_layers_of_their_own(cupy: Any) -> None:
    values = {"dense": {"weight": np.asfortranarray(start()[0]), "bias": start()[1]}}
    there = {"dense": {k: cupy.asarray(v) for k, v in values["dense"].items()}}
    assert there["dense"]["weight"].flags.f_contiguous
    gpu, cpu = Optimizer("adamw", there), Optimizer("adamw", values, backend="numpy")
    grads = {k: v * 0.5 for k, v in values["dense"].items()}
    with gpu.partial(), cpu.partial():
        gpu.update("dense", {k: cupy.asarray(v) for k, v in grads.items()})
        cpu.update("dense", grads)
    for name, value in values["dense"].items():
        np.testing.assert_allclose(there["dense"][name].get(), value, rtol=1e-14)


def test_where_a_rule_is_evaluated(cupy: Any) -> None:
    pair = Pair(cupy, "schedule_free_adamw")
    pair.step(0)
    for optimizer in (pair.gpu, pair.cpu):
        optimizer.eval()
    pair.check()
    for optimizer in (pair.gpu, pair.cpu):
        optimizer.train()
    pair.step(1)
    pair.check()


@pytest.mark.parametrize("rule", ["adamw", "prodigy", "nadam"])
def test_a_state_is_saved_as_numpy_s_and_goes_on_anywhere(cupy: Any, rule: str) -> None:
    pair = Pair(cupy, rule)
    pair.step(0)
    saved = pair.gpu.state_dict()
    assert all(type(v) is np.ndarray for own in saved["state"].values() for v in own.values())
    pair.cpu.load_state_dict(saved)
    again = [cupy.asarray(p.get()) for p in pair.ours]
    gpu = Optimizer(rule, again)
    gpu.load_state_dict(saved)
    pair.step(1)
    gpu.step([cupy.asarray(g) for g in tenth(seed=2)])
    pair.check()
    for ours, other in zip(pair.ours, again, strict=True):
        np.testing.assert_allclose(ours.get(), other.get(), rtol=1e-14)
    saved["state"]["0"].popitem()
    with pytest.raises(StateMismatch):
        gpu.load_state_dict(saved)


# Errors


def refused(*given: Any, **more: Any) -> str:
    with pytest.raises(TensorError) as caught:
        Optimizer("adamw", *given, **more)
    return str(caught.value)


def test_arrays_of_two_kinds_or_two_gpus_are_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = cupy.zeros(3), np.zeros(3)
    words = "parameter a is a CuPy array and parameter b is not: give arrays of one kind to an optimizer, the others"
    assert refused({"a": there, "b": here}) == f"{words} to another"
    assert refused({"b": here, "a": there}) == f"{words} to another"
    other = cupy.zeros(3)
    monkeypatch.setitem(cuda_stand_in.DEVICES, id(other), 1)
    assert refused([there, other]) == (
        "parameter 0 is on GPU 0 and parameter 1 on GPU 1: give those of each GPU to an optimizer of their own"
    )


def test_arrays_that_cannot_be_updated_are_refused(cupy: Any) -> None:
    whole = cupy.zeros((4, 6))
    assert refused([whole[:, ::2]]) == (
        "parameter 0 is not contiguous: pass cupy.ascontiguousarray of it, or the whole array"
    )
    assert refused([whole, whole[1:3]]) == "parameter 0 and parameter 1 share memory: give each array once"
    assert refused([cupy.zeros(3, np.int32)]) == (
        "an array of dtype int32 cannot be optimized: use one of float32, float64, bfloat16, float16"
    )


def test_gradients_that_do_not_fit_are_refused_and_nothing_is_written(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = cupy.asarray(np.ones((4, 3)))
    optimizer = Optimizer("adamw", [param])
    elsewhere = cupy.zeros((4, 3))
    monkeypatch.setitem(cuda_stand_in.DEVICES, id(elsewhere), 1)
    for grad, words in (
        (np.zeros((4, 3)), "the gradient of 0 is a ndarray, not a CuPy array"),
        (cupy.zeros((3, 4)), "the gradient of 0 has shape (3, 4), its parameter (4, 3)"),
        (cupy.zeros((4, 3), np.float32), "the gradient of 0 has dtype float32, where float64 is expected"),
        (cupy.zeros((4, 6))[:, ::2], "the gradient of 0 is not contiguous in its parameter's memory order: pass "
                                     "cupy.asarray(grad, order='C')"),
        (param, "the gradient of 0 shares memory with parameter 0: pass a copy of it"),
        (elsewhere, "a gradient or input is on GPU 1, its parameter on GPU 0: move it there"),
    ):  # fmt: skip
        optimizer.step([cupy.asarray(np.ones((4, 3)))])
        before = param.get()
        with pytest.raises(TensorError) as caught:
            optimizer.step([grad])
        assert str(caught.value) == words
        assert (param.get() == before).all()
    assert int(optimizer.state("0")["step"]) == 6


def test_numpy_arrays_are_refused_by_the_backend_and_cupy_s_by_others(cupy: Any) -> None:
    array = np.ones(3)
    with pytest.raises(TensorError) as caught:
        Optimizer("adamw", [array], backend="cupy").step([np.ones(3)])
    assert str(caught.value) == (
        "the cupy backend works on a GPU, and one of the parameters of AdamW is a numpy array in main memory: pass "
        "cupy.asarray(array), or use backend 'cpu'"
    )
    assert (array == 1).all()
    there = cupy.asarray(array)
    with pytest.raises(TensorError, match="CuPy arrays can be updated by backend 'cupy' alone"):
        Optimizer("adamw", [there], backend="cpu").step([cupy.asarray(array)])
    assert (there.get() == 1).all()


def test_without_memory_for_the_state_nothing_is_changed(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    param, grad = cupy.asarray(np.ones(2**20)), cupy.asarray(np.ones(2**20))
    optimizer = Optimizer("adamw", [param])

    def fail(*_: Any) -> Any:
        raise cuda_stand_in.OutOfMemory

    with monkeypatch.context() as patch:
        patch.setattr(cupy, "empty", fail)
        with pytest.raises(TensorError) as caught:
            optimizer.step([grad])
    assert str(caught.value) == (
        "GPU 0 has no memory for the states of 1 arrays (16 MiB): nothing was changed; use fewer or narrower states "
        "(state_dtype), or free memory"
    )
    assert (param.get() == 1).all()
    assert optimizer.state("0") == {}
    optimizer.step([grad])
    assert (param.get() < 1).all()


def test_states_in_bfloat16_need_a_cupy_that_has_it(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Optimizer("adamw", [cupy.asarray(np.ones(5, np.float32))], state_dtype="bfloat16")
    grad = cupy.asarray(np.ones(5, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(cupy, "__version__", "13.6.0")
        with pytest.raises(TensorError) as caught:
            optimizer.step([grad])
    assert str(caught.value) == ("CuPy 13.6.0 has no bfloat16: install CuPy 14 or later, or choose another state dtype")
    optimizer.step([grad])
    assert optimizer.state("0")["m"].dtype.name == "bfloat16"


# The library


def test_the_library_has_every_operation_and_matrix_function(cupy: Any) -> None:
    """But for atan2, which the compiler makes of other operations."""
    assert CupyLibrary().arithmetic.keys() == NumpyLibrary().arithmetic.keys() - {Op.ATAN2}
    assert CupyLibrary().matrix.keys() == NumpyLibrary().matrix.keys()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arithmetic_is_the_language_s(cupy: Any, dtype: str) -> None:
    x = np.array(SPECIAL, dtype)
    y = np.roll(x, 7)
    for op, function in ((op, function) for op, function in arithmetic().items() if op is not Op.CHANCE):
        given = [x != 0, x, y] if op is Op.WHERE else [x, y][: SPECS[op].arity]
        with np.errstate(all="ignore"):
            found, wanted = function(*map(cupy.asarray, given)).get(), NUMPY[op](*given)
        assert found.dtype == wanted.dtype, op
        np.testing.assert_allclose(found, wanted, rtol=4 * np.finfo(dtype).eps, err_msg=str(op))


def test_random_bits_are_those_of_numpy(cupy: Any) -> None:
    like, words = np.zeros((2, 5, 3), np.float32), (7, 1, 3, 5, 2)
    drawn = arithmetic()[Op.CHANCE](cupy.asarray(like), *words).get()
    assert np.array_equal(drawn, NumpyLibrary().arithmetic[Op.CHANCE](like, *words))


def test_numbers_take_the_dtype_of_the_arrays_they_meet(cupy: Any) -> None:
    narrow, number = cupy.asarray(np.ones((1, 2, 2), np.float32)), cupy.asarray(np.float64(0.1))
    table, library = arithmetic(), CupyLibrary()
    assert table[Op.MUL](narrow, number).dtype == np.float32
    assert table[Op.MUL](narrow, library.constant(0.1)).dtype == np.float32
    assert table[Op.MUL](number, library.constant(0.1)).dtype == np.float64
    assert isinstance(table[Op.ADD](library.constant(0.1), library.constant(0.2)), np.float64)


def test_random_numbers_and_reductions_are_the_runtime_s(cupy: Any) -> None:
    ours, theirs = CupyLibrary(), NumpyLibrary()
    position = {"seed": 3, "tensor": 5, "draw": 1, "step": 7}
    for op in (Op.UNIFORM, Op.NORMAL):
        wanted = theirs.random(op, 13, position)
        for step in (7, cupy.asarray(np.float64(7))):
            found = ours.random(op, 13, {**position, "step": step})
            np.testing.assert_allclose(found.get(), wanted, rtol=1e-14)
    values = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    for op in (Op.SUM, Op.MIN, Op.MAX):
        for axes in ((2,), (1,), (0, 1, 2), None, ()):
            found, wanted = ours.reduce(op, cupy.asarray(values), axes).get(), theirs.reduce(op, values, axes)
            np.testing.assert_allclose(found, wanted, rtol=1e-14)
            assert (found.shape, found.dtype) == (np.shape(wanted), np.float64)
        empty = np.zeros((0, 3, 4), np.float32)
        found, wanted = ours.reduce(op, cupy.asarray(empty), (0,)).get(), theirs.reduce(op, empty, (0,))
        assert (found == wanted).all()


def test_lbfgs(cupy: Any) -> None:
    """The numbers of NumPy, and a checkpoint in main memory that goes on."""

    def stepped(params: list[Any], optimizer: Any) -> Any:
        module = cupy if params is ours else np

        def evaluate() -> Any:
            return sum(float(((p - 1) ** 4).sum()) for p in params), [module.asarray(4 * (p - 1) ** 3) for p in params]

        return optimizer.step(evaluate)

    ours, theirs = [cupy.asarray(p) for p in start()], start()
    pair = [rulec.array.LBFGS(params, line_search_fn="strong_wolfe", max_iter=4) for params in (ours, theirs)]
    stepped(ours, pair[0])
    stepped(theirs, pair[1])
    saved = pair[0].state_dict()
    assert type(saved["state"]["direction"]) is np.ndarray
    again = rulec.array.LBFGS(ours)
    again.load_state_dict(saved)
    assert stepped(ours, again) == pytest.approx(stepped(theirs, pair[1]), rel=1e-10)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.get(), other, rtol=1e-10)
