"""The memory of a training step in JAX, by XLA's own analysis of the compiled step, from shapes alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.memory.steps import APOLLO, LAYERS, RULES, WIDTH, chosen_rules
from benchmarks.result import Row
from rulec.memory.shape import LLAMA, SMALL, Shape

#: Rows of the linear model's inputs, and tokens of the one sequence: few, so that activations are.
BATCH = 16

PEAK = "most at once, times the weights"


@dataclass(frozen=True)
class Model:
    """A model in JAX, by the shapes of its parameters and batch.

    `eager` and `deferred` take a rule and hyper-parameters, and give the bytes of a step. With `stacked` one array has
    the weights of all layers.
    """

    name: str
    eager: Callable[..., Any]
    deferred: Callable[..., Any]
    rank: int
    stacked: bool = False


def missing() -> str | None:
    """A note about jax where it is not installed; None where it is."""
    return None if importlib.util.find_spec("jax") else "rulec.jax is left out: jax is not installed"


def models(quick: bool) -> list[Callable[[], Model]]:
    """The makers of the models; quick ones have a few layers."""
    layers, width = (3, 64) if quick else (LAYERS, WIDTH)
    small = replace(SMALL, layers=2, width=64, inner=128, vocabulary=256, heads=2, groups=2) if quick else SMALL
    llama = replace(LLAMA, layers=2, width=128, inner=256, vocabulary=512, heads=4, groups=4, head=32)
    return [
        lambda: _linears(layers, width),
        lambda: _scanned_linears(layers, width),
        lambda: _tied(small),
        lambda: _llama(llama if quick else LLAMA),
    ]


def parts(only: Sequence[str] = ()) -> int:
    """The number of calls of `advance` in `measure`."""
    return 0 if missing() else len(models(True)) * len(chosen_rules(only))


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object], notes: list[str]) -> list[Row]:
    """The rows of all models and rules."""
    reason = missing()
    if reason is not None:
        notes.append(reason)
        return []
    rows: list[Row] = []
    for make in models(quick):
        model = make()
        for rule in chosen_rules(only):
            rows += _rows(model, rule)
            advance()
    if rows:
        notes.append(NOTE)
    return rows


NOTE = (
    f"figures of JAX are XLA's for the CPU, from shapes alone: of all that a step needs, with {BATCH} rows or tokens "
    f"in a batch, so that activations are few; Apollo on stacks is left out where gradients are kept, as each stack "
    f"would be one tensor to it; all is in float32"
)


def _rows(model: Model, rule: str) -> Iterator[Row]:
    import rulec

    chosen = rulec.load(rule)
    if rule == "apollo":
        chosen = chosen.bind(rank=model.rank)
    for way, bytes_of in (("deferred", model.deferred), ("eager", model.eager)):
        if model.stacked and way == "deferred" and rule == "apollo":
            continue  # a stack would be one tensor, with another state
        needed = bytes_of(chosen, **RULES[rule])
        detail: Mapping[str, Any] = needed.as_dict()
        judged = rule == "apollo" and way == "eager" and model.name.startswith("Llama")
        value, target = needed.peak / needed.weights, APOLLO if judged else None
        yield Row(f"JAX: {model.name}, {rule}, {way}", PEAK, value, target, "at most", "", detail)


def _shaped(*shape: int, dtype: str = "float32") -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _unrolled(name: str, loss: Callable[..., Any], params: Any, batch: Any, rank: int) -> Model:
    """A model whose layers are written out one after the other."""
    from rulec.jax.eager import deferred_bytes, eager_step

    def eager(rule: Any, **hyper: Any) -> Any:
        return eager_step(loss, rule).bytes(params, batch, **hyper)

    return Model(name, eager, lambda rule, **hyper: deferred_bytes(loss, rule, params, batch, **hyper), rank)


def _scanned(name: str, functions: Mapping[str, Any], params: Any, batch: Any, rank: int) -> Model:
    """A model of stacked layers. Deferred, a rule sees a stack as one tensor."""
    from rulec.jax.eager import deferred_bytes, eager_scan

    def eager(rule: Any, **hyper: Any) -> Any:
        return eager_scan(rule=rule, **functions).bytes(params, batch, **hyper)

    def deferred(rule: Any, **hyper: Any) -> Any:
        loss = eager_scan(rule=rule, **functions).loss
        return deferred_bytes(loss, rule, params, batch, **hyper)

    return Model(name, eager, deferred, rank, stacked=True)


def _linears(layers: int, width: int) -> Model:
    import jax.numpy as jnp

    def loss(params: Any, batch: Any) -> Any:
        for weight in params:
            batch = jnp.tanh(batch @ weight)
        return jnp.mean(batch**2)

    params = [_shaped(width, width) for _ in range(layers)]
    return _unrolled(f"{layers} linear layers of {width}", loss, params, _shaped(BATCH, width), width // 16)


def _scanned_linears(layers: int, width: int) -> Model:
    import jax.numpy as jnp

    functions = {
        "layer": lambda weights, x: jnp.tanh(x @ weights),
        "head": lambda rest, x, batch: jnp.mean((x @ rest) ** 2),
        "embed": lambda rest, batch: batch,
    }
    params = {"layers": _shaped(layers, width, width), "rest": _shaped(width)}
    return _scanned(
        f"{layers} linear layers of {width}, scanned", functions, params, _shaped(BATCH, width), width // 16
    )


def _norm(x: Any, scale: Any) -> Any:
    import jax

    y = x.astype("float32")
    return (y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def _attention(weights: Mapping[str, Any], x: Any, shape: Shape) -> Any:
    import jax

    query, key, value = (
        (x @ weights[name]).reshape(*x.shape[:2], -1, shape.head) for name in ("query", "key", "value")
    )  # fmt: skip
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return attended.reshape(*x.shape[:2], -1) @ weights["out"]


def _layer(weights: Mapping[str, Any], x: Any, shape: Shape) -> Any:
    """A layer of Llama's without positions: they have no weights."""
    import jax

    x = x + _attention(weights, _norm(x, weights["before"]), shape)
    y = _norm(x, weights["between"])
    return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]


def _cross_entropy(scores: Any, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    logs = jax.nn.log_softmax(scores[:, :-1].astype("float32"))
    return -jnp.take_along_axis(logs, tokens[:, 1:, None], -1).mean()


def _layer_shapes(shape: Shape, dtype: str, *lead: int) -> dict[str, Any]:
    inner, outer = shape.heads * shape.head, shape.groups * shape.head
    sizes = {
        "before": (shape.width,), "between": (shape.width,), "query": (shape.width, inner),
        "key": (shape.width, outer), "value": (shape.width, outer), "out": (inner, shape.width),
        "gate": (shape.width, shape.inner), "up": (shape.width, shape.inner), "down": (shape.inner, shape.width),
    }  # fmt: skip
    return {name: _shaped(*lead, *size, dtype=dtype) for name, size in sizes.items()}


def _tied(shape: Shape) -> Model:
    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens]
        for weights in params["layers"]:
            x = _layer(weights, x, shape)
        return _cross_entropy(_norm(x, params["norm"]) @ params["embedding"].T, tokens)

    params = {
        "embedding": _shaped(shape.vocabulary, shape.width), "norm": _shaped(shape.width),
        "layers": [_layer_shapes(shape, "float32") for _ in range(shape.layers)],
    }  # fmt: skip
    tokens = _shaped(1, BATCH, dtype="int32")
    return _unrolled("a transformer with tied embeddings", loss, params, tokens, shape.width // 16)


def _llama(shape: Shape) -> Model:
    functions = {
        "layer": lambda weights, x: _layer(weights, x, shape),
        "head": lambda rest, x, tokens: _cross_entropy(_norm(x, rest["norm"]) @ rest["head"], tokens),
        "embed": lambda rest, tokens: rest["embedding"][tokens],
    }
    dtype = "float32"  # XLA has no products in bfloat16 on the CPU, and would convert all weights
    rest = {
        "embedding": _shaped(shape.vocabulary, shape.width, dtype=dtype), "norm": _shaped(shape.width, dtype=dtype),
        "head": _shaped(shape.width, shape.vocabulary, dtype=dtype),
    }  # fmt: skip
    params = {"layers": _layer_shapes(shape, dtype, shape.layers), "rest": rest}
    tokens = _shaped(1, BATCH, dtype="int32")
    return _scanned("Llama of 7.5B, scanned", functions, params, tokens, shape.width // 16)
