"""Steps in JAX for comparison: ours, and optax's update and addition in one jit. Both reuse donated memory.

Each contender has parameters and a state of its own; the gradients are shared. A step has ended when its parameters are
there: one program makes them and the state.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import rulec
from benchmarks.kernels import hyper_defaults
from rulec.language.library.load import interop_entries
from rulec.tools.compare.target import translate

#: Elements of the tile of random numbers that arrays are made of.
_TILE = 1 << 16

Step = Callable[[], object]


def array(elements: int, seed: str) -> Any:
    """A float32 array of normal random numbers, repeated from a tile."""
    import jax.numpy as jnp

    tile = np.random.default_rng(zlib.crc32(seed.encode())).normal(size=min(_TILE, elements)).astype(np.float32)
    return jnp.array(np.resize(tile, elements))


def tree(leaves: int, elements: int, seed: str) -> dict[str, Any]:
    """A tree of `leaves` arrays by name."""
    return {f"layer{i}": array(elements, f"{seed} {i}") for i in range(leaves)}


def ours(
    rule: str, grads: Any, params: Any, *, packed: bool = False, together: int = 1, **keywords: Any
) -> Step:  # fmt: skip
    """`together` steps of `rulec.jax.step` at default hyper-parameters, with packed states where `packed`."""
    import jax

    import rulec.jax

    state = rulec.jax.init(rule, params, packed=packed)
    held = [params, state]

    def step() -> None:
        for _ in range(together):
            held[:] = rulec.jax.step(rule, held[0], grads, held[1], **keywords)
        jax.block_until_ready(held[0])  # type: ignore[no-untyped-call]

    return step


def theirs(rule: str, grads: Any, params: Any, together: int = 1) -> Step:
    """The same steps by optax: update and `apply_updates` in one jit, parameters and state donated."""
    import jax
    import optax

    optimizer = transformation(rule)

    def update(params: Any, state: Any, grads: Any) -> Any:
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    held = [params, jax.jit(optimizer.init)(params)]
    jitted = jax.jit(update, donate_argnums=(0, 1))

    def step() -> None:
        for _ in range(together):
            held[:] = jitted(*held, grads)
        jax.block_until_ready(held[0])  # type: ignore[no-untyped-call]

    return step


def transformation(rule: str) -> Any:
    """optax's transformation for a rule of the library, at our default hyper-parameters."""
    entry, function = _entry(rule)
    program = rulec.compile(rulec.load(rule))
    return function(**translate(hyper_defaults(program), function, entry, {}).keywords)


def called(rule: str) -> str:
    """The name of optax's function for a rule."""
    names = interop_entries(rulec.load(rule), "optax")[0]["function"]
    return str(names if isinstance(names, str) else names[0])


def _entry(rule: str) -> tuple[Mapping[str, Any], Callable[..., Any]]:
    import optax

    function = functools.reduce(getattr, called(rule).split("."), optax)
    return interop_entries(rulec.load(rule), "optax")[0], function
