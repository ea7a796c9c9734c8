"""Rules with a state for each axis beside what else may hold their states: the host, codes, blocks and sections."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from torch import nn

import rulec
import rulec.jax
import rulec.torch
from tests.torch.offload.links import late_links
from tests.torch.offload.runs import assert_same_bits, parameters, take_steps
from tests.torch.offload.training import Training
from tests.torch.test_sections import Fused

#: A kernel of a convolution, one of another, a matrix and a vector.
KERNELS = ((6, 4, 3, 3), (5, 3, 2), (7, 4), (9,))

RULES = ("soap_axes", "shampoo_axes", "kron_axes")


def settings(name: str) -> dict[str, Any]:
    return {"lr": 0.01, "every": 2, **({} if name == "kron_axes" else {"max_dim": 5})}


@pytest.mark.parametrize("name", RULES)
def test_states_of_axes_on_the_host_have_the_bits_of_the_device(name: str) -> None:
    kind = rulec.torch.optimizer(name)
    with late_links():
        plain, moved = parameters(torch.float32, KERNELS), parameters(torch.float32, KERNELS)
        one = kind(plain, **settings(name))
        other = kind(moved, offload="states", offload_buffer=8192, **settings(name))
        take_steps(one, plain, 4)
        take_steps(other, moved, 4)
        assert_same_bits(moved, plain)
        assert_same_bits(other.state_dict()["state"], one.state_dict()["state"])


@pytest.mark.parametrize("name", RULES[:1])
def test_a_step_on_the_host_has_the_bits_of_the_device(name: str) -> None:
    training = Training(name, KERNELS, torch.float32, 8192, steps=4, **settings(name))
    training.check()


@pytest.mark.parametrize("storage", ["bfloat16", "dynamic8", "int8"])
@pytest.mark.parametrize("name", RULES[:2])
def test_states_of_axes_in_few_bits_are_those_of_the_arrays(name: str, storage: str) -> None:
    """In torch and on NumPy's arrays, of which one goes on from its saved states in the middle."""
    rng = np.random.default_rng(0)
    start = [rng.standard_normal(shape).astype(np.float32) for shape in KERNELS]
    params = [nn.Parameter(torch.tensor(x)) for x in start]
    kind, arrays = rulec.torch.optimizer(name), [x.copy() for x in start]
    ours = kind(params, state_dtype=storage, **settings(name))
    theirs = rulec.array.Optimizer(name, arrays, state_dtype=storage, **settings(name))
    for step in range(4):
        grads = [rng.standard_normal(shape).astype(np.float32) for shape in KERNELS]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g)
        ours.step()
        theirs.step(grads)
        if step == 1:
            saved = copy.deepcopy(ours.state_dict())
            ours = kind(params, state_dtype=storage, **settings(name))
            ours.load_state_dict(saved)
    for p, x in zip(params, arrays, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-4, atol=1e-5)
    assert any((p.detach().numpy() != x).any() for p, x in zip(params, start, strict=True))


#: Products, roots and orthogonal factors of the blocks of heads.
BLOCKS = """
name: Heads
hyper: {lr: 0.1, heads: {default: 2, static: true, whole: true, min: 1}}
state: {l: {init: 0, shape: [rows, rows/heads]}}
applies_to: ndim == 2
otherwise: sgd
step: |
  l = l + matmul(g, transpose(g, per=block(rows/heads)), per=block(rows/heads))
  o = newton_schulz(g, steps=3, dtype="float64", per=block(rows/heads))
  direction = matmul(inverse_root(l, 2, eps=0.1, per=block(rows/heads)), o, per=block(rows/heads))
"""


@pytest.mark.parametrize("split", [2, [8, 4]])
def test_blocks_of_sections_are_those_of_parameters(split: Any) -> None:
    fused = _fused(BLOCKS, (12, 4), split)
    for seed in (1, 2, 3):
        fused.step(seed)
    saved = copy.deepcopy(fused.optimizer.state_dict())
    fused.optimizer = fused.fresh()
    fused.optimizer.load_state_dict(saved)
    fused.step(4)
    fused.check()


def _fused(text: str, shape: tuple[int, ...], split: Any) -> Fused:
    with mock.patch("tests.torch.test_sections.kind_of", return_value=rulec.torch.optimizer(rulec.parse(text))):
        return Fused("heads", shape, split, 0)


READERS = {
    "one": "name: One\nhyper: {lr: 1}\ninputs: {cov: {shape: [cols, cols]}}\nstep: |\n  direction = g @ cov\n",
    "two": "name: Two\nhyper: {lr: 1}\ninputs: {cov: {shape: [cols, cols]}}\nstate: {m: 0}\n"
    "step: |\n  m = m + g\n  direction = transpose(solve(cov + eye(cols), transpose(m)))\n",
}


def test_a_matrix_input_is_read_by_two_rules_of_a_partition() -> None:
    made = nn.ParameterDict({k: nn.Parameter(torch.ones(3, n, dtype=torch.float64)) for k, n in (("a", 2), ("b", 4))})
    partition = rulec.partition({"a": rulec.parse(READERS["one"]), "b": rulec.parse(READERS["two"])})
    optimizer = rulec.torch.Partitioned(partition, made.named_parameters(), lr=0.5)
    covs = {p: torch.full((p.shape[1], p.shape[1]), 0.5, dtype=torch.float64) for p in made.values()}
    for p in made.values():
        p.grad = torch.arange(float(p.numel()), dtype=torch.float64).reshape(p.shape)
    optimizer.step(inputs={"cov": covs})
    a, b = made["a"], made["b"]
    torch.testing.assert_close(a.detach(), 1 - 0.5 * a.grad @ covs[a])
    torch.testing.assert_close(b.detach(), 1 - 0.5 * b.grad @ torch.linalg.inv(covs[b] + torch.eye(4)).double())


def test_states_of_axes_go_on_in_jax(tmp_path: Path) -> None:
    """A kernel's factors are saved in torch, and JAX ends where torch does.

    Which axes have factors depends on a static hyper-parameter.
    """
    rng = np.random.default_rng(2)
    start = {f"w{i}": rng.standard_normal(shape) for i, shape in enumerate(KERNELS)}
    params = {name: nn.Parameter(torch.tensor(x)) for name, x in start.items()}
    grads = [{name: rng.standard_normal(x.shape) for name, x in start.items()} for _ in range(5)]
    words = settings("shampoo_axes")
    optimizer = rulec.torch.optimizer("shampoo_axes")([*params.items()], **words)
    with jax.enable_x64(True):
        for step, of in enumerate(grads):
            if step == 3:
                rulec.torch.save(optimizer, tmp_path / "kernel.safetensors")
                others = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in params.items()}
                state = rulec.jax.load(tmp_path / "kernel.safetensors", "shampoo_axes", others, tags={}, **words)
            for name, p in params.items():
                p.grad = torch.tensor(of[name])
            optimizer.step()
            if step >= 3:
                given = {name: jax.numpy.asarray(g) for name, g in of.items()}
                others, state = rulec.jax.step("shampoo_axes", others, given, state, tags={}, **words)
        for name, p in params.items():
            np.testing.assert_allclose(np.asarray(others[name]), p.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_states_of_axes_go_on_from_arrays(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(3), tmp_path / "kernel.safetensors"
    arrays = {f"w{i}": rng.standard_normal(shape) for i, shape in enumerate(KERNELS)}
    grads = [{name: rng.standard_normal(x.shape) for name, x in arrays.items()} for _ in range(4)]
    words = settings("shampoo_axes")
    first = rulec.array.Optimizer("shampoo_axes", arrays, **words)
    for of in grads[:3]:
        first.step(of)
    rulec.array.save(first, file)
    copies = {name: x.copy() for name, x in arrays.items()}
    params = {name: nn.Parameter(torch.tensor(x)) for name, x in arrays.items()}
    again = rulec.array.Optimizer("shampoo_axes", copies, **words)
    rulec.array.load(again, file)
    ours = rulec.torch.optimizer("shampoo_axes")([*params.items()], **words)
    rulec.torch.load(ours, file)
    for name, p in params.items():
        p.grad = torch.tensor(grads[3][name])
    for step in (lambda: first.step(grads[3]), lambda: again.step(grads[3]), ours.step):
        step()
    for name, x in arrays.items():
        np.testing.assert_array_equal(copies[name], x)
        np.testing.assert_allclose(params[name].detach().numpy(), x, rtol=1e-10, atol=1e-12)
