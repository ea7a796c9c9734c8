"""A state of rows, matrices, axes, blocks or elements takes a value of fewer axes: a number, an input, the model's.

Each element of the state is then this number. The witness is NumPy, line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.compiler.reference import ReferenceOptimizer
from tests.runtime.elsewhere import Elsewhere, Here
from tests.runtime.test_device import Run, check_close

Array = np.ndarray[Any, Any]

SHAPES = [(3, 4), (2, 3, 4), (1, 4), (2, 4)]
HYPER, LOSS = 0.25, 0.75

#: Text -> its number at step `t`, for the gradients of all tensors, and the place of one.
VALUES: dict[str, Callable[[int, list[Array], int], float]] = {
    "2": lambda t, g, i: 2.0,
    "h": lambda t, g, i: HYPER,
    "h**t": lambda t, g, i: HYPER**t,
    "numel": lambda t, g, i: float(g[i].size),
    "loss": lambda t, g, i: LOSS,
    "loss*h": lambda t, g, i: LOSS * HYPER,
    'mean(g, per="tensor")': lambda t, g, i: float(np.mean(g[i])),
    'sum(g, per="group")': lambda t, g, i: float(sum(x.sum() for x in g)),
    'norm(norm(g, per="model"))': lambda t, g, i: float(np.sqrt(sum(np.sum(x * x) for x in g))),
    'max(g, per="model") + h*t': lambda t, g, i: max(float(x.max()) for x in g) + HYPER * t,
    "shared": lambda t, g, i: 3.0 if t == 1 else float(sum(x.sum() for x in g) / 2),
}

#: Name -> the declaration of a state, and its numbers of elements in a tensor of this shape.
MATRICES: dict[str, tuple[str, Callable[[tuple[int, ...]], int]]] = {
    "of_row": ("per: row", lambda s: int(np.prod(s[:-1]))),
    "of_col": ("per: col", lambda s: int(np.prod(s) // s[-2])),
    "of_matrix": ("per: matrix", lambda s: int(np.prod(s[:-2]))),
    "of_tensor": ("per: tensor", lambda s: 1),
    "of_element": ("per: element", lambda s: int(np.prod(s))),
    "of_its_own": ("shape: [rows, 2]", lambda s: int(np.prod(s[:-1])) * 2),
}
AXES: dict[str, tuple[str, Callable[[tuple[int, ...]], int]]] = {
    "of_first": ("per: axis(0)", lambda s: s[0]),
    "of_last": ("per: axis(-1)", lambda s: s[-1]),
}
BLOCKS: dict[str, tuple[str, Callable[[tuple[int, ...]], int]]] = {
    "of_block": ("per: block(4)", lambda s: int(np.prod(s)) // 4)
}
KINDS = {"matrices": MATRICES, "axes": AXES, "blocks": BLOCKS}


def rule_of(text: str, kind: str) -> rulec.Rule:
    """A rule that assigns a value to states of all levels of a kind, after a step by the sums of their old values."""
    states = "".join(f"  {key}: {{init: 1, {how}}}\n" for key, (how, _) in KINDS[kind].items())
    lines = "".join(f"  {key} = {text}\n" for key in KINDS[kind])
    before = " + ".join(f'sum({key}, per="tensor")' for key in KINDS[kind])
    return rulec.parse(
        f"name: R\nhyper: {{lr: 1.0, h: {HYPER}}}\ninputs: {{loss: scalar}}\nstate:\n"
        f"  shared: {{init: 3, per: model}}\n{states}step: |\n  before = {before} + 0*loss\n{lines}"
        f'  shared = sum(g, per="model")/2\n  direction = g*before + 0*shared\n'
    )


def gradients(step: int) -> list[Array]:
    rng = np.random.default_rng(step)
    return [rng.normal(size=shape) for shape in SHAPES]


def expected(text: str, kind: str, steps: int) -> tuple[list[Array], list[float]]:
    """The parameters after so many steps, and the number in all states of each tensor."""
    params, numbers = [np.zeros(shape) for shape in SHAPES], [1.0 for _ in SHAPES]
    for t in range(1, steps + 1):
        known = gradients(t)
        if text == "shared" and t > 1:
            known = gradients(t - 1)
        for i, g in enumerate(gradients(t)):
            params[i] = params[i] - g * numbers[i] * sum(count(g.shape) for _, count in KINDS[kind].values())
            numbers[i] = VALUES[text](t, known, i)
    return params, numbers


def check(text: str, kind: str, params: list[Any], states: list[dict[str, Any]], rtol: float = 1e-12) -> None:
    wanted, numbers = expected(text, kind, 2)
    for mine, right, state, number in zip(params, wanted, states, numbers, strict=True):
        np.testing.assert_allclose(mine, right, rtol=rtol, atol=rtol)
        for key in KINDS[kind]:
            np.testing.assert_allclose(np.asarray(state[key], np.float64), number, rtol=rtol, err_msg=key)


each = pytest.mark.parametrize(("text", "kind"), [(text, kind) for text in VALUES for kind in KINDS])


@each
def test_in_the_reference(text: str, kind: str) -> None:
    reference = ReferenceOptimizer(rule_of(text, kind), [np.zeros(shape) for shape in SHAPES])
    for t in (1, 2):
        reference.step(gradients(t), inputs={"loss": LOSS})
    check(text, kind, reference.params, [reference.state(i) for i in range(len(SHAPES))])


def check_by_arrays(text: str, kind: str, backend: str) -> None:
    params = [np.zeros(shape) for shape in SHAPES]
    opt = rulec.array.Optimizer(rule_of(text, kind), params, backend=backend)
    for t in (1, 2):
        opt.step(gradients(t), loss=LOSS)
    check(text, kind, params, [opt.state(name) for name in opt.names])


@each
def test_on_arrays(text: str, kind: str) -> None:
    check_by_arrays(text, kind, "numpy")


@pytest.mark.slow
@each
@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_by_compiled_kernels(text: str, kind: str, backend: str) -> None:
    check_by_arrays(text, kind, backend)


def check_by_jax(text: str, kind: str) -> None:
    import jax.numpy as jnp

    import rulec.jax

    rule, params = rule_of(text, kind), [jnp.zeros(shape) for shape in SHAPES]
    state = rulec.jax.init(rule, params)
    for t in (1, 2):
        grads = [jnp.asarray(g, "float32") for g in gradients(t)]
        params, state = rulec.jax.step(rule, params, grads, state, loss=LOSS)
    states = [{key: getattr(state, key)[i] for key in KINDS[kind]} for i in range(len(SHAPES))]
    check(text, kind, params, states, 1e-4)


@pytest.mark.slow
@each
def test_in_jax(text: str, kind: str) -> None:
    check_by_jax(text, kind)


def test_a_number_of_the_model_in_jax() -> None:
    import jax.numpy as jnp

    import rulec.jax

    rule = rulec.parse("""
name: R
state: {m: {init: 0, per: row}, n: {init: 0, per: row}}
step: |
  m = sum(g, per="model")
  n = 2
  direction = g + 0*m*n
""")
    params, grads = [jnp.zeros((2, 3))], [jnp.ones((2, 3))]
    _, state = rulec.jax.step(rule, params, grads, rulec.jax.init(rule, params))
    np.testing.assert_array_equal(state.m[0], np.full((2, 1), 6.0))
    np.testing.assert_array_equal(state.n[0], np.full((2, 1), 2.0))


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("text", [text for text in VALUES if text != "shared"])
def test_on_a_device(text: str, resident: bool) -> None:
    states = "".join(f"  {key}: {{init: 1, {how}}}\n" for key, (how, _) in MATRICES.items())
    lines = "".join(f"  {key} = {text}\n" for key in MATRICES)
    rule = rulec.parse(
        f"name: R\nhyper: {{lr: 1.0, h: {HYPER}}}\ninputs: {{loss: scalar}}\nstate:\n{states}step: |\n"
        f'  before = {" + ".join(MATRICES)}\n{lines}  direction = g*mean(before, per="row") + 0*loss\n'.replace(
            " + of_its_own", ' + sum(of_its_own, per="row")'
        )
    )
    ours, theirs = Run(rule, Elsewhere(), resident), Run(rule, Here())
    for seed, fired in enumerate(([*range(8)], [0, 2, 5, 6], [*range(8)])):
        ours.step(seed, fired)
        theirs.step(seed, fired)
    check_close(ours, theirs, 1e-12)


def test_a_step_that_is_skipped_keeps_the_old_number() -> None:
    rule = rulec.parse("""
name: R
hyper: {lr: 1.0}
state: {m: {init: 5, per: row}}
skip: sum(g) < 0
step: |
  d = m
  m = sum(g, per="model")
  direction = d
""")
    params = [np.zeros((2, 3)), np.zeros((4, 3))]
    opt = rulec.array.Optimizer(rule, params, backend="numpy")
    opt.step([np.ones((2, 3)), -np.ones((4, 3))])
    opt.step([np.ones((2, 3)), np.ones((4, 3))])
    np.testing.assert_array_equal(params[0], 1.0)
    np.testing.assert_array_equal(opt.state(opt.names[0])["m"], np.full((2, 1), 18.0))
    np.testing.assert_array_equal(params[1], -5.0)
