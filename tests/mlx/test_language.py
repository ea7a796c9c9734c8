"""Matrices divided by a norm, branches of values with different axes, and coarse states, beside the reference."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import rulec  # noqa: E402
import rulec.mlx  # noqa: E402
from rulec.compiler.reference import ReferenceOptimizer  # noqa: E402

SHAPES = [(5, 4), (3, 7), (2, 3, 4)]

#: Lines of a step that has the state `m`, and ends with the direction.
STEPS = {
    "norm": "direction = newton_schulz(m)",
    "a number": 'direction = newton_schulz(m, coefficients="modded_nanogpt", normalize=1.02)',
    "divided before": 'direction = newton_schulz(m/(1.02*norm(m, per="matrix") + 1e-6), normalize="none")',
    "a number or elements": 'if h > 0.2:\n  a = 3\nelse:\n  a = g\ndirection = m + sum(a) + norm(a, per="row")',
    "rows or a number": 'if t > 1:\n  a = mean(g, per="row")\nelse:\n  a = 3\ndirection = g*norm(a, per="model")',
    "a state set to a number": "if t > 1:\n  m = 0\ndirection = g*sum(m + 1)",
    "a number for each row": "n = r\nr = t\nsize = norm(g)\ndirection = g*sum(r + 1) + n",
    "indices": 'w = cos(index(per="row", n=cols)*index(per="col", n=cols)/cols)\ndirection = g @ w + m*(index() % t)',
    "a batch": "direction = g + mean(transpose(uniform([rows, cols]))) + norm(eye(rows))",
}


@pytest.mark.parametrize("lines", STEPS.values(), ids=STEPS)
def test_a_step_is_that_of_the_reference(lines: str) -> None:
    states = "m: 0" + (", r: {init: 1, per: row}, size: {init: 0, per: tensor}" if "size" in lines else "")
    body = "".join(f"  {line}\n" for line in ["m = m + g", *lines.split("\n")])
    rule = rulec.parse(f"name: R\nhyper: {{lr: 0.1, h: 0.25}}\nstate: {{{states}}}\nstep: |\n{body}")
    numbers = np.random.default_rng(0)
    first = [numbers.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    params = {str(i): mx.array(x) for i, x in enumerate(first)}
    optimizer = rulec.mlx.optimizer(rule)(learning_rate=0.1)
    reference = ReferenceOptimizer(rule, [x.astype(np.float64) for x in first], {"lr": 0.1})
    for _ in range(3):
        gradients = [numbers.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        params = optimizer.apply_gradients({str(i): mx.array(g) for i, g in enumerate(gradients)}, params)
        reference.step([g.astype(np.float64) for g in gradients])
    for i, wanted in enumerate(reference.params):
        np.testing.assert_allclose(np.array(params[str(i)]), wanted, rtol=2e-5, atol=2e-5)
