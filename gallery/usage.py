"""Three short programs with a rule: in PyTorch, in JAX, and on arrays."""

from __future__ import annotations

from gallery.kernels import fenced
from gallery.subject import Subject
from rulec.compiler.routing import Router
from rulec.language.compose.combine import replace_names
from rulec.language.expr.node import name
from rulec.language.expr.text import expression_text
from rulec.language.inputs import SCALAR, InputKind
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_tags

TORCH = """\
import torch
import rulec.torch

model = torch.nn.Linear(64, 10{bias})
data = torch.randn(32, 64)
{optimizer}
{step}"""

TORCH_STEP = """
model(data).square().mean().backward()
optimizer.step({inputs})"""

TORCH_PASSES = """
def closure():
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    return loss

optimizer.step(closure)"""

JAX = """\
import jax
import jax.numpy as jnp
import rulec.jax

params = {{"kernel": jnp.ones((64, 10)), "bias": jnp.zeros(10)}}
gradient = jax.grad(lambda p: jnp.mean((p["kernel"].sum(0) + p["bias"]) ** 2))
tx = rulec.jax.transform({arguments})
state = tx.init(params)
updates, state = tx.update(gradient(params), state, params{inputs})
params = jax.tree.map(jnp.add, params, updates)"""

ARRAYS = """\
import numpy as np
import rulec

weights = [np.ones((64, 10), np.float32), np.zeros(10, np.float32)]
optimizer = rulec.array.Optimizer({arguments})
optimizer.step([0.1*w + 1 for w in weights]{inputs})"""


def usage(subject: Subject, text: str) -> dict[str, str]:
    """Framework -> a program with the rule; `text` is the rule as a composition."""
    rule, rate = subject.whole, _rate(subject.whole)
    keywords = f", lr={rate}" if rate else ""
    return {
        "PyTorch": TORCH.format(
            bias="" if rule.applies_to is None else ", bias=False",
            optimizer=_torch_optimizer(subject, text, keywords),
            step=_torch_step(rule),
        ).strip(),
        "JAX": JAX.format(arguments=f'"{text}"{keywords}{_tags(rule)}', inputs=_jax_inputs(rule)),
        "Arrays": ARRAYS.format(arguments=f'"{text}", weights{keywords}', inputs=_array_inputs(rule)),
    }


def programs(subject: Subject, text: str) -> str:
    """The same as sections of a page."""
    return "\n\n".join(f"### {head}\n\n{fenced(code, 'python')}" for head, code in usage(subject, text).items())


def _rate(rule: Rule) -> str:
    default = rule.settings["lr"].default if "lr" in rule.settings else None
    return f"{default:g}" if isinstance(default, float | int) else ""


def _torch_optimizer(subject: Subject, text: str, keywords: str) -> str:
    kind = f"rulec.torch.{subject.title}" if subject.title else f'rulec.torch.optimizer("{text}")'
    return f"optimizer = {kind}(model.parameters(){keywords})"


def _torch_step(rule: Rule) -> str:
    if rule.passes:
        return TORCH_PASSES
    inputs = [f'"{key}": {_torch_input(kind)}' for key, kind in rule.inputs.items()]
    return TORCH_STEP.format(inputs=f"inputs={{{', '.join(inputs)}}}" if inputs else "")


def _torch_input(kind: InputKind) -> str:
    matrix = "{p: torch.eye(%s) for p in model.parameters()}"
    return _value(kind, "[torch.ones_like(p) for p in model.parameters()]", matrix, "p")


def _value(kind: InputKind, like: str, matrix: str, param: str) -> str:
    """The text of an input; `matrix` has a place for its extents, of the array with the name `param`."""
    if isinstance(kind, str):
        return "0.5" if kind == SCALAR else like
    sides = {"rows": name(f"{param}.shape[0]"), "cols": name(f"{param}.shape[1]")}
    return matrix % ", ".join(expression_text(replace_names(extent, sides)) for extent in kind.extents)


def _jax_inputs(rule: Rule) -> str:
    if rule.passes:
        return ", gradient=gradient"
    like, matrix = "jax.tree.map(jnp.ones_like, params)", '{"kernel": jnp.eye(%s)}'
    values = {key: _value(kind, like, matrix, 'params["kernel"]') for key, kind in rule.inputs.items()}
    return "".join(f", {key}={value}" for key, value in values.items())


def _tags(rule: Rule) -> str:
    """The tags of a bias, for a rule that asks."""
    return ', tags={"bias": {"bias"}}' if any(map(reads_tags, Router(rule).rules)) else ""


def _array_inputs(rule: Rule) -> str:
    if rule.passes:
        return ", gradient=lambda: [0.1*w + 1 for w in weights]"
    like, matrix = "[np.ones_like(w) for w in weights]", "[np.eye(%s, dtype=np.float32), None]"
    values = {key: _value(kind, like, matrix, "weights[0]") for key, kind in rule.inputs.items()}
    return "".join(f", {key}={value}" for key, value in values.items())
