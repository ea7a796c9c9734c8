"""The roles of axes in models of Flax and parameters of Haiku, for `axes` of `rulec.jax.transform`.

A module's class says what the axes of its parameters are. Parameters by themselves say it by their names, and by the
shape of a bias beside a kernel.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from rulec.errors import TensorError
from rulec.functional.axes import AxisRoles
from rulec.jax.leaves import paths_of
from rulec.jax.oriented import axis_roles
from rulec.language.partition import matches

#: The roles of the axes of parameters, by path.
RolesByPath: TypeAlias = dict[str, tuple[str, ...]]

#: The roles of a module's parameters by name, but for leading axes of a batch.
_OfModule: TypeAlias = Mapping[str, tuple[str, ...]]


def flax_axes(
    model: Any, *inputs: Any, stacked: str | Sequence[str] = (), axes: Mapping[str, Any] | None = None, **keywords: Any
) -> RolesByPath:  # fmt: skip
    """The roles of the axes of parameters of Flax, by path: what `rulec.jax.transform` takes as `axes`.

    `model` is a module of NNX, a module of Linen with the `inputs` and `keywords` of its `init`, or parameters. By
    modules every layer of Flax is known: dense layers, attention, convolutions, embeddings, norms, LoRA, and stacks of
    them by `scan` and `vmap`. Modules of other classes with parameters of their own are left out. Parameters are known
    by names and shapes; `stacked` has patterns of paths of parameters that begin with the axis of a stack of layers.
    `axes` has the roles of parameters that none of this tells, by path or pattern; they come before all others.

    TensorError where parameters do not tell it.
    """
    explicit = axis_roles(axes)
    inferred = _of_flax(model, inputs, stacked, explicit, keywords)
    return dict(axes or {}) | {path: roles for path, roles in inferred.items() if not explicit.knows(path)}


def _of_flax(
    model: Any, inputs: Sequence[Any], stacked: str | Sequence[str], known: AxisRoles, keywords: Mapping[str, Any]
) -> RolesByPath:  # fmt: skip
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    if nnx is not None and isinstance(model, nnx.Module) and not isinstance(model, nnx.State):
        return dict(_of_nnx(model, nnx))
    if linen is not None and isinstance(model, linen.Module):
        return _of_linen(model, linen, inputs, keywords)
    return _of_parameters(model, [stacked] if isinstance(stacked, str) else stacked, known)


# By modules


def _of_nnx(model: Any, nnx: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Module):
            continue
        for name, roles in _of_module(module).items():
            variable = getattr(module, name, None)
            if isinstance(variable, nnx.Variable):
                yield "/".join(map(str, (*path, name))), _with_batch(roles, jnp.ndim(variable.get_raw_value()))


def _of_linen(model: Any, linen: Any, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> RolesByPath:
    known: dict[tuple[str, ...], _OfModule] = {}

    def noted(call: Callable[..., Any], args: Any, named: Any, context: Any) -> Any:
        equation = next((x for x in (*args, *named.values()) if isinstance(x, str)), "")
        known[tuple(context.module.path)] = _of_module(context.module, equation)
        return call(*args, **named)

    with linen.intercept_methods(noted):
        variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs, **keywords))
    params = linen.meta.unbox(variables).get("params", {})
    paths, leaves, _ = paths_of(params)
    roles: RolesByPath = {}
    for (_, path), leaf in zip(paths, leaves, strict=True):
        *module, name = path.split("/")
        if name in known.get(tuple(module), {}):
            roles[path] = _with_batch(known[tuple(module)][name], len(leaf.shape))
    return roles | {f"params/{path}": words for path, words in roles.items()}


def _with_batch(roles: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The roles of so many axes: the first, before the module's, are of a stack of modules."""
    return ("batch",) * (count - len(roles)) + roles


def _of_module(module: Any, equation: str = "") -> _OfModule:
    """The roles of the parameters of a module of Flax; none of a module of another class."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("flax.")]
    for name in names:
        if name in _MODULES:
            return _MODULES[name](module, equation)
    return {}


def _dense(module: Any, equation: str) -> _OfModule:
    return {"kernel": ("inputs", "outputs"), "bias": ("outputs",)} | _LORA


def _general(module: Any, equation: str) -> _OfModule:
    batch = len(getattr(module, "batch_axis", None) or _tuple(getattr(module, "batch_dims", ())))
    outputs = ("outputs",) * len(_tuple(getattr(module, "out_features", None) or module.features))
    inputs = ("inputs",) * len(_tuple(module.axis))
    return {"kernel": ("batch",) * batch + inputs + outputs, "bias": ("batch",) * batch + outputs}


def _tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _einsum(module: Any, equation: str) -> _OfModule:
    """The roles by an equation: letters of a kernel are summed away, new, or in both operands and the result."""
    operands, _, result = (equation or module.einsum_str or "").replace(" ", "").partition("->")
    first, _, kernel = operands.partition(",")
    if not (kernel and result):
        return {}
    roles = {x: "inputs" if x not in result else "batch" if x in first else "outputs" for x in kernel}
    bias = [x for x in result if roles.get(x) in ("batch", "outputs")]
    return {"kernel": tuple(map(roles.__getitem__, kernel)), "bias": tuple(map(roles.__getitem__, bias))}


def _conv(module: Any, equation: str) -> _OfModule:
    window = ("window",) * len(_tuple(module.kernel_size))
    sides = ("outputs", "inputs") if getattr(module, "transpose_kernel", False) else ("inputs", "outputs")
    local = type(module).__name__ == "ConvLocal"
    return {"kernel": window + sides, "bias": (*(window if local else ()), "outputs")}


def _embed(module: Any, equation: str) -> _OfModule:
    return {"embedding": ("outputs", "inputs")}


def _vectors(module: Any, equation: str) -> _OfModule:
    return {"scale": ("outputs",), "bias": ("outputs",)}


_LORA = {"lora_a": ("inputs", "outputs"), "lora_b": ("inputs", "outputs")}

#: Class of Flax -> the roles of a module's parameters.
_MODULES: Mapping[str, Callable[[Any, str], _OfModule]] = {
    **dict.fromkeys(("Linear", "Dense", "DenseParams", "LoRA"), _dense),
    **dict.fromkeys(("LinearGeneral", "DenseGeneral"), _general),
    "Einsum": _einsum,
    **dict.fromkeys(("Conv", "ConvLocal", "_Conv", "ConvTranspose"), _conv),
    "Embed": _embed,
    **dict.fromkeys(("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"), _vectors),
}


# By names and shapes


def _of_parameters(params: Any, stacked: Sequence[str], known: AxisRoles) -> RolesByPath:
    paths, leaves, _ = paths_of(params)
    shapes = {path: tuple(jnp.shape(leaf)) for (_, path), leaf in zip(paths, leaves, strict=True)}
    roles: RolesByPath = {}
    for path, shape in shapes.items():
        if known.knows(path):
            continue
        batch = ("batch",) * any(matches(pattern, path) for pattern in stacked)
        layer, _, name = path.rpartition("/")
        bias = shapes.get(f"{layer}/bias" if layer else "bias")
        kernel = shapes.get(f"{layer}/kernel" if layer else "kernel")
        extents = shape[len(batch) :]
        if name == "kernel":
            inferred = _kernel(layer, extents, None if bias is None else bias[len(batch) :], shapes)
            if inferred is None:
                raise _untold(path, shape)
        elif name == "bias" and kernel is not None:
            inferred = _beside(_kernel(layer, kernel[len(batch) :], extents, shapes), len(extents))
        else:
            inferred = _named(name, extents)
        if inferred:
            roles[path] = batch + inferred
    return roles


def _kernel(
    layer: str, shape: tuple[int, ...], bias: tuple[int, ...] | None, shapes: Mapping[str, Any]
) -> tuple[str, ...] | None:  # fmt: skip
    """The roles of a kernel of this shape, beside a bias or None, in a layer of this path; None where nothing tells."""
    name, parent = layer.rpartition("/")[2], layer.rpartition("/")[0]
    count = len(shape)
    stack = ("batch",) * max(0, (0 if bias is None else len(bias)) - 1)
    if count == 2:
        return ("inputs", "outputs")
    if re.fullmatch(r"(query|key|value|[qkv])(_proj)?", name):
        return ("batch",) * (count - 3) + ("inputs", "outputs", "outputs")
    if name in ("out", "o", "out_proj", "o_proj") and any(_is_query(path, parent) for path in shapes):
        return ("batch",) * (count - 3) + ("inputs", "inputs", "outputs")
    if re.search(r"conv", name, re.IGNORECASE):
        return stack + ("window",) * (count - 2 - len(stack)) + ("inputs", "outputs")
    if re.fullmatch(r"(Dense|Linear)_?\d*", name, re.IGNORECASE):
        return ("batch",) * (count - 2) + ("inputs", "outputs")
    inferred = [roles for roles in _OF_THREE if bias is not None and _fits(roles, shape, bias)] if count == 3 else []
    return inferred[0] if len(inferred) == 1 else None


#: The roles that a kernel of three axes may have: of a stack, of several outputs, of several inputs.
_OF_THREE = (
    ("batch", "inputs", "outputs"), ("inputs", "outputs", "outputs"), ("inputs", "inputs", "outputs"),
    ("window", "inputs", "outputs"),
)  # fmt: skip


def _fits(roles: tuple[str, ...], shape: tuple[int, ...], bias: tuple[int, ...]) -> bool:
    return bias == tuple(n for n, role in zip(shape, roles, strict=True) if role in ("batch", "outputs"))


def _is_query(path: str, parent: str) -> bool:
    place = path.removeprefix(f"{parent}/" if parent else "")
    return re.fullmatch(r"(query|q)(_proj)?/kernel", place) is not None


def _beside(kernel: tuple[str, ...] | None, count: int) -> tuple[str, ...] | None:
    """The roles of a bias with that many axes beside a kernel."""
    roles = tuple(role for role in kernel or () if role in ("batch", "outputs"))
    return roles if len(roles) == count else None


def _named(name: str, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """The roles of a parameter by its name alone."""
    if name in ("scale", "bias") and shape:
        return _with_batch(("outputs",), len(shape))
    if name == "embedding" and len(shape) == 2:
        return ("outputs", "inputs")
    return _LORA.get(name) if len(shape) == 2 else None


def _untold(path: str, shape: tuple[int, ...]) -> TensorError:
    return TensorError(
        f"neither its name nor a bias tells what the axes of {path}, of shape {shape}, are: give flax_axes the model, "
        f"say stacked={path!r} where the first is of a stack of layers, or give it axes={{{path!r}: ...}} with a "
        f"role for each"
    )


# Haiku


def haiku_axes(params: Any) -> RolesByPath:
    """The roles of the axes of parameters of Haiku, by path: what `rulec.jax.transform` takes as `axes`.

    `params` are the parameters or their shapes. Known are parameters called `w`, `w_i`, `w_h`, `b`, `embeddings`,
    `scale` and `offset` as Haiku's modules call them, also in a `layer_stack`; others are left out.
    """
    paths, leaves, _ = paths_of(params)
    roles: RolesByPath = {}
    for (_, path), leaf in zip(paths, leaves, strict=True):
        layer, _, name = path.rpartition("/")
        stacks = len(re.findall(r"__layer_stack\w*", layer))
        inferred = _of_haiku(layer.rpartition("/")[2], name, jnp.ndim(leaf) - stacks)
        if inferred is not None:
            roles[path] = ("batch",) * stacks + inferred
    return roles


def _of_haiku(module: str, name: str, count: int) -> tuple[str, ...] | None:
    """The roles of a parameter with that many axes, in a module of this name."""
    if name in ("b", "scale", "offset") and count:
        return ("outputs",) * count
    if name == "embeddings" and count == 2:
        return ("outputs", "inputs")
    if name not in ("w", "w_i", "w_h") or count < 2:
        return None
    sides = ("outputs", "inputs") if "transpose" in module else ("inputs", "outputs")
    return ("window",) * (count - 2) + sides
