"""Values of fewer axes than a tensor of which each process has a part: as for the whole tensor."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rulec.torch
from tests.torch.eager.processes import check_in_processes

SHAPES = [(4, 3, 3), (6, 4)]

#: A draw of the parameter's shape is made in parts, and sent whole to the owner of the matrices.
TRANSPOSED = "x = sum(transpose(uniform([rows, cols])))"

LINES = [
    TRANSPOSED, "x = mean(eye(rows))", "x = mean(uniform([rows, cols]))", 'x = norm(eye(cols), per="model")',
    'x = mean(sum(eye(rows), per="row"), per="tensor")', "x = row\nrow = 2", 'x = row\nrow = mean(g, per="model")',
    "x = col\ncol = norm(g)", "x = matrix\nmatrix = h",
]  # fmt: skip

#: The other arm is a number. The last ones are of another shape than the parameter's.
ARMS = [
    'mean(g, per="row")', 'mean(g, per="col")', 'mean(g, per="matrix")', "g", "transpose(g)", "g @ transpose(g)",
    'sum(transpose(g), per="row")', "diag(g @ transpose(g))", "eye(cols)", 'sum(eye(cols), per="row")',
]  # fmt: skip

#: Sums of a value to several levels, within a tensor first and over several tensors.
SUMS = 'x = sum(v, per="tensor") + mean(v*v, per="group") + sum(sum(v + 1, per="row")) + norm(v, per="model")'

#: A state that is set to a number, and then added up.
SET = [f"{level} = t\nx = sum({level} + 1) + norm({level})" for level in ("row", "col", "matrix")]


def number_or(value: str, known: bool = True) -> str:
    """A value that is a number on one arm, by a condition on `h` or on `t`, and its sums."""
    return f"v = 3\nif {'h > 0.5' if known else 't > 1'}:\n  v = {value}\n{SUMS}"


def rule_of(lines: str) -> rulec.Rule:
    states = "".join(f"{key}: {{init: 1, per: {key}}}, " for key in ("row", "col", "matrix") if f"{key} = " in lines)
    step = "".join(f"  {line}\n" for line in lines.splitlines())
    return rulec.parse(
        f"name: R\nhyper: {{lr: 1.0, h: 0.25}}\nstate: {{m: 0, {states}}}\nstep: |\n{step}"
        f"  m = m + g\n  direction = x*m + 0*h\n"
    )


def stepped(rule: rulec.Rule, dimension: int | None) -> list[torch.Tensor]:
    """The parameters after two steps, cut along a dimension or whole."""
    mesh = init_device_mesh("cpu", (2,))

    def placed(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if dimension is None else distribute_tensor(x.clone(), mesh, [Shard(dimension)])

    params = [nn.Parameter(placed(torch.zeros(shape, dtype=torch.float64))) for shape in SHAPES]
    opt = rulec.torch.optimizer(rule)(params, lr=1.0)
    for step in range(2):
        for i, p in enumerate(params):
            made = torch.Generator().manual_seed(10 * step + i)
            p.grad = placed(torch.randn(SHAPES[i], generator=made, dtype=torch.float64))
        opt.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in params]


def alike(lines: str) -> None:
    rule = rule_of(lines)
    whole = stepped(rule, None)
    for dimension in (0, 1):
        for mine, wanted in zip(stepped(rule, dimension), whole, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12, msg=f"{lines} along {dimension}")


def placed(x: torch.Tensor, dimension: int | None) -> torch.Tensor:
    """The tensor, cut along a dimension or whole."""
    mesh = init_device_mesh("cpu", (2,))
    return x.clone() if dimension is None else distribute_tensor(x.clone(), mesh, [Shard(dimension)])


#: Directions of indices, and whether a step of them sends anything.
INDICES = {
    'where(index() % 2 < t, index(0), g*index(-1)) + index(per="col")': False,
    'g*sum(index(per="row")) + sum(index()*g)': True,
    'g @ cos(index(per="row", n=cols)*index(per="col", n=cols)) + index(1)': True,
}


def indices(rank: int) -> None:
    """Shards have the places of their elements in the whole tensor: along rows, columns and the batch."""
    for (text, sends), view in product(INDICES.items(), ("", "view: {short: first}\n")):
        rule = rulec.parse(f"name: R\n{view}hyper: {{lr: 1.0}}\nstep: |\n  direction = {text}\n")
        steps = {}
        for dimension in (None, 0, 1):
            params = [nn.Parameter(placed(torch.zeros(shape, dtype=torch.float64), dimension)) for shape in SHAPES]
            optimizer = rulec.torch.optimizer(rule)(params)
            for p, shape in zip(params, SHAPES, strict=True):
                p.grad = placed(torch.arange(p.numel(), dtype=torch.float64).reshape(shape).sin(), dimension)
            optimizer.step()
            optimizer.step()
            if dimension is not None:
                assert sends or str(optimizer.communication()) == "a step sends nothing", text
            steps[dimension] = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
        for dimension in (0, 1):
            for mine, wanted in zip(steps[dimension], steps[None], strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12, msg=f"{text} along {dimension}")


def few(rank: int) -> None:
    indices(rank)
    alike(TRANSPOSED)
    alike(number_or(ARMS[0]))
    alike(f"v = transpose(g)\n{SUMS}")  # only one of the two tensors needs an owner


def every(rank: int) -> None:
    arms = [number_or(arm, known) for arm in ARMS for known in (True, False)]
    for lines in (*LINES, *arms, *SET):
        alike(lines)


def test_draws_numbers_and_reductions_of_parts() -> None:
    check_in_processes(few)


@pytest.mark.slow
def test_values_of_fewer_axes_are_those_of_whole_tensors() -> None:
    check_in_processes(every)
