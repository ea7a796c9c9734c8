"""What a training step in JAX keeps in memory, by XLA's own analysis of the compiled step, from shapes alone."""

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
    """A model in JAX: its parameters and batch by their shapes, and what accounts for a step of it.

    `eager` and `deferred` take a rule and hyper-parameters, and give the bytes of a step. `stacked` says that one array
    has the weights of all layers.
    """

    name: str
    eager: Callable[..., Any]
    deferred: Callable[..., Any]
    rank: int
    stacked: bool = False


def missing() -> str | None:
    """What there must be for this part and is not here; None where all is there."""
    return None if importlib.util.find_spec("jax") else "rulec.jax is left out: jax is not installed"


def models(quick: bool) -> list[Callable[[], Model]]:
    """What makes the models; quick ones are a few layers of them."""
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
    """How often `measure` calls `advance`."""
    return 0 if missing() else len(models(True)) * len(chosen_rules(only))


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object], notes: list[str]) -> list[Row]:
    """The rows of all models and rules."""
    reason = missing()
    if reason is not None:
        notes.append(reason)
        return []
    found: list[Row] = []
    for make in models(quick):
        model = make()
        for rule in chosen_rules(only):
            found += _rows(model, rule)
            advance()
    if found:
        notes.append(NOTE)
    return found


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
        found = bytes_of(chosen, **RULES[rule])
        detail: Mapping[str, Any] = found.as_dict()
        judged = rule == "apollo" and way == "eager" and model.name.startswith("Llama")
        value, target = found.peak / found.weights, APOLLO if judged else None
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
        "layer": lambda own, x: jnp.tanh(x @ own),
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


def _attention(own: Mapping[str, Any], x: Any, shape: Shape) -> Any:
    import jax

    query, key, value = (
        (x @ own[name]).reshape(*x.shape[:2], -1, shape.head) for name in ("query", "key", "value")
    )  # fmt: skip
    made = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return made.reshape(*x.shape[:2], -1) @ own["out"]


def _layer(own: Mapping[str, Any], x: Any, shape: Shape) -> Any:
    """A layer of Llama's without positions, which have no weights there."""
    import jax

    x = x + _attention(own, _norm(x, own["before"]), shape)
    y = _norm(x, own["between"])
    return x + (jax.nn.silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]


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
        for own in params["layers"]:
            x = _layer(own, x, shape)
        return _cross_entropy(_norm(x, params["norm"]) @ params["embedding"].T, tokens)

    params = {
        "embedding": _shaped(shape.vocabulary, shape.width), "norm": _shaped(shape.width),
        "layers": [_layer_shapes(shape, "float32") for _ in range(shape.layers)],
    }  # fmt: skip
    tokens = _shaped(1, BATCH, dtype="int32")
    return _unrolled("a transformer with tied embeddings", loss, params, tokens, shape.width // 16)


def _llama(shape: Shape) -> Model:
    functions = {
        "layer": lambda own, x: _layer(own, x, shape),
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
