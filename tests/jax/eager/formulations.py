"""Ways to write an eager AdamW step of stacked layers by hand, and what XLA makes of each: why ours is as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rulec.jax.eager.memory import bytes_of
from rulec.jax.library import compiler_options
from tests.jax.eager.models import head, layer


def adam(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    """One step, without bias correction."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p), m, v


def updated(params: Any, grads: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
    """A tree of them."""
    leaves = [adam(*four) for four in zip(*map(jax.tree.leaves, (params, grads, first, second)), strict=True)]
    p, m, v = (jax.tree.unflatten(jax.tree.structure(params), column) for column in zip(*leaves, strict=True))
    return p, m, v


def forward(stacks: Any, rest: Any, batch: Any) -> tuple[Any, Any]:
    """The inputs of all layers, and the gradient of the last one's result."""
    end, inputs = jax.lax.scan(lambda x, own: (layer(own, x), x), batch[0], stacks[0])
    return inputs, jax.grad(lambda x: head(rest, x, batch))(end)


def deferred(stacks: Any, rest: Any, batch: Any) -> Any:
    """All gradients, then the update of the stacks."""

    def loss(params: Any) -> Any:
        return head(rest, jax.lax.scan(lambda x, own: (layer(own, x), None), batch[0], params)[0], batch)

    return updated(stacks[0], jax.grad(loss)(stacks[0]), *stacks[1:])


def scanned(stacks: Any, rest: Any, batch: Any) -> Any:
    """A reverse scan, the stacks as what it goes over and what it gives."""
    inputs, dx = forward(stacks, rest, batch)

    def body(dx: Any, given: Any) -> Any:
        (own, *states), x = given
        grads, dx = jax.vjp(layer, own, x)[1](dx)
        return dx, updated(own, grads, *states)

    return jax.lax.scan(body, dx, (stacks, inputs), reverse=True)[1]


def looped(keep_axis: bool, barrier: bool = False) -> Callable[..., Any]:
    """A loop that carries the stacks; what is updated has the layer as an axis of length one, or not."""

    def step(stacks: Any, rest: Any, batch: Any) -> Any:
        inputs, dx = forward(stacks, rest, batch)
        last = inputs.shape[0] - 1

        def body(place: Any, carried: Any) -> Any:
            stacks, dx = carried
            index = last - place
            own, x = at((stacks[0], inputs), index)
            grads, dx = jax.vjp(layer, own, x)[1](dx)
            if keep_axis:
                cut = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index, 1), stacks)
                new = updated(cut[0], jax.tree.map(lambda g: g[None], grads), *cut[1:])
            else:
                cut = at(stacks, index)
                if barrier:
                    cut, grads, dx = jax.lax.optimization_barrier((cut, grads, dx))  # type: ignore[no-untyped-call]
                new = jax.tree.map(lambda a: a[None], updated(cut[0], grads, *cut[1:]))
            put = jax.lax.dynamic_update_slice_in_dim
            return jax.tree.map(lambda a, b: put(a, b, index, 0), stacks, new), dx

        return jax.lax.fori_loop(0, last + 1, body, (stacks, dx))[0]

    return step


def at(stack: Any, index: Any) -> Any:
    """One layer of a stack."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), stack)


#: Each with the function, and whether XLA is asked to look for an order of reads and writes.
_ALL: dict[str, tuple[Callable[..., Any], bool]] = {
    "deferred": (deferred, True),
    "scan over the stacks": (scanned, True),
    "loop": (looped(False), False),
    "loop, a stack of one": (looped(True), False),
    "loop, barriers": (looped(False, True), False),
    "loop, in order": (looped(False), True),
    "loop, a stack of one, in order": (looped(True), True),
}

NAMES = list(_ALL)

#: Those that hold more than half of the weights again.
COPYING = [name for name in NAMES if not name.endswith("in order")]


def layers_beyond_inputs(name: str, params: Any, batch: Any) -> float:
    """Bytes of XLA's temporary buffer beyond the inputs of all layers, in gradients of one layer."""
    function, ordered = _ALL[name]
    options = compiler_options() if ordered else None
    stacks = (params["layers"],) * 3
    made = jax.jit(function, donate_argnums=0, compiler_options=options).lower(stacks, params["rest"], batch).compile()
    layers = params["layers"]["b"].shape[0]
    stats: Any = made.memory_analysis()
    own = bytes_of(params["layers"]) // layers
    return float((stats.temp_size_in_bytes - layers * bytes_of(batch[0])) / own)


def table(params: Any, batch: Any) -> str:
    """What each of them takes, as a table in Markdown."""
    layers = params["layers"]["b"].shape[0]
    head = "| formulation | gradients of one layer | times the weights |\n|---|---|---|\n"
    found = [(name, layers_beyond_inputs(name, params, batch)) for name in NAMES]
    return head + "\n".join(f"| {name} | {own:.2f} | {own / layers:.2f} |" for name, own in found)
