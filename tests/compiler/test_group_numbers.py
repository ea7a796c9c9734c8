"""`tensor` and `tensors`: the number of a tensor in its group and the count of the group, in all ways to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.array
import rulec.torch
from rulec.compiler.pipeline import _compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError

Array = np.ndarray[Any, Any]

SHAPES: list[tuple[int, ...]] = [(3, 2), (4,), (3, 2), (5, 1), (2, 2)]

#: A number beside elements, one that is kept, and one that a branch is decided by before each step.
TEXT = """
name: Numbered
hyper: {lr: 1.0}
state: {n: {init: 0, per: tensor}}
step: |
  n = n + tensor
  if tensor % 2 == 1:
    k = 10
  else:
    k = tensors
  direction = g*(tensor + 100*tensors) + 1000*k + n
"""

STEPS = 2


def expected(counts: list[int]) -> list[float]:
    """What each tensor has moved after the steps, by arithmetic, for groups of these sizes."""
    moved = []
    for count in counts:
        for i in range(count):
            kept = [i * step for step in range(1, STEPS + 1)]
            moved += [sum(i + 100 * count + 1000 * (10 if i % 2 else count) + n for n in kept)]
    return moved


def check(params: list[Any], counts: list[int]) -> None:
    for param, moved in zip(params, expected(counts), strict=True):
        np.testing.assert_array_equal(np.asarray(param), -moved)


def test_reference_and_arrays() -> None:
    rule = rulec.parse(TEXT)
    reference = ReferenceOptimizer(rule, [np.zeros(s) for s in SHAPES], [{}, {}], groups=[0, 0, 1, 1, 1])
    params = [np.zeros(s, np.float32) for s in SHAPES]
    optimizer = rulec.array.Optimizer(rule, params)
    for _ in range(STEPS):
        reference.step([np.ones(s) for s in SHAPES])
        optimizer.step([np.ones(s, np.float32) for s in SHAPES])
    check(reference.params, [2, 3])
    check(params, [5])


def test_no_program_for_each_tensor() -> None:
    """Two programs: of the branch that is taken, and of the other."""
    rule = rulec.parse(TEXT)
    before = _compile.cache_info().misses
    params = [np.zeros((3, i + 1)) for i in range(20)]
    rulec.array.Optimizer(rule, params).step([np.ones_like(p) for p in params])
    assert _compile.cache_info().misses - before == 3


@pytest.mark.parametrize("words", [{}, {"backend": "c"}, {"offload": "step"}], ids=["cpu", "c", "offload"])
def test_groups_of_torch(words: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in SHAPES]
    kind = rulec.torch.optimizer(rulec.parse(TEXT))
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = kind(groups, **words)
    for step in range(STEPS):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 0:
            saved, optimizer = optimizer.state_dict(), kind(groups, **words)
            optimizer.load_state_dict(saved)
    check([p.detach() for p in params], [2, 3])


def test_updates_in_the_backward_pass() -> None:
    module = torch.nn.Module()
    for i, shape in enumerate(SHAPES):
        module.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape)))
    optimizer = rulec.torch.EagerUpdate(module, rulec.parse(TEXT))
    for _ in range(STEPS):
        with optimizer.backward():
            torch.stack([p.sum() for p in module.parameters()]).sum().backward()
        optimizer.step()
    check([p.detach() for p in module.parameters()], [5])


def test_jax() -> None:
    import jax.numpy as jnp

    import rulec.jax

    rule = rulec.parse(TEXT)
    params: Any = [jnp.zeros(s) for s in SHAPES]
    state = rulec.jax.init(rule, params)
    for _ in range(STEPS):
        params, state = rulec.jax.step(rule, params, [jnp.ones(s) for s in SHAPES], state)
    check(params, [5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: R\nstep: |\n  p = p + sum(eye(tensor + 1))\n", "depends on tensor, which differs between tensors of"),
        ("name: R\nhyper: {tensor: 1}\nstep: |\n  p = p*tensor\n", "tensor"),
        ("name: R\nstep: |\n  tensors = 2\n  p = p*tensors\n", "tensors"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    def made() -> None:
        ReferenceOptimizer(rulec.parse(text), [np.ones((2, 3))])

    with pytest.raises(RulecError, match=message):
        made()
