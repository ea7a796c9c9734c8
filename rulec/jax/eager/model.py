"""A model of equal layers in a row, whose parameters are stacked: forward as a whole, and back one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rulec.errors import TensorError
from rulec.jax.eager.call import Mode, UserFunction
from rulec.jax.eager.tied import ALONE, Tied

#: Visits one layer in a loop: from its number, its gradients and the carried value to the next carried value.
Visit = Callable[[Any, Any, Any], Any]


class Model:
    """The functions of a model, and whether head and layers return `aux` beside their result."""

    def __init__(
        self, embed: Callable[..., Any] | None, layer: Callable[..., Any], head: Callable[..., Any], has_aux: bool,
        layer_aux: bool,
    ) -> None:  # fmt: skip
        self.embed = UserFunction(embed or (lambda rest, batch: batch[0]), "embed", ["key"])
        self.layer = UserFunction(layer, "layer", ["rest", "batch", "key", "index"])
        self.head = UserFunction(head, "head", ["key"])
        self.has_aux, self.layer_aux = has_aux, layer_aux

    @property
    def shares_rest(self) -> bool:
        """Whether layers read the parameters of the rest."""
        return "rest" in self.layer.taken


@dataclass(frozen=True)
class Bound:
    """A model with its parameters, a batch, and a key or None."""

    model: Model
    layers: Any
    rest: Any
    batch: Any
    key: Any
    shared_layer: Tied = ALONE
    shared_rest: Tied = ALONE

    @property
    def count(self) -> int:
        """The number of layers."""
        return int(jax.tree.leaves(self.layers)[0].shape[0])

    def embed(self, rest: Any) -> Any:
        """The input of the first layer. TensorError where it is not of floating point."""
        start = self.model.embed(self.shared_rest.everywhere(rest), self.batch, key=self._key(self.count))
        for leaf in jax.tree.leaves(start):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TensorError(
                    f"what goes through the layers is differentiated, and embed returns {leaf.dtype}: let layers that "
                    f"need it name batch among their parameters"
                )
        return start

    def layer(self, params: Any, x: Any, rest: Any, index: Any) -> tuple[Any, Any]:
        """The input of the next layer, and `aux` or None. TensorError where it has another shape or dtype than `x`."""
        whole = self.shared_rest.everywhere(rest) if self.model.shares_rest else None
        offered = {"rest": whole, "batch": self.batch, "key": self._key(index), "index": index}
        result = self.model.layer(self.shared_layer.everywhere(params), x, **offered)
        end, aux = pair(result, "a layer", "x") if self.model.layer_aux else (result, None)
        before, after = jax.tree.map(_described, x), jax.tree.map(_described, end)
        if before != after:
            raise TensorError(f"a layer must return what the next one takes: it takes {before} and returns {after}")
        return end, aux

    def head(self, rest: Any, x: Any) -> tuple[Any, Any]:
        """The loss, and `aux` or None."""
        result = self.model.head(self.shared_rest.everywhere(rest), x, self.batch, key=self._key(self.count + 1))
        loss, aux = pair(result, "the head", "loss") if self.model.has_aux else (result, None)
        check_loss(loss)
        return loss, aux

    def through(self, x: Any, keep: Callable[[Any, Any], Any], remat: bool = False) -> tuple[Any, Any]:
        """The output of the last layer, and the stacked results of `keep(input, aux)` for each layer."""

        def forward(x: Any, layer: Any) -> tuple[Any, Any]:
            end, aux = self.layer(layer[0], x, self.rest, layer[1])
            return end, keep(x, aux)

        indices = jnp.arange(self.count, dtype=jnp.int32)
        return jax.lax.scan(jax.checkpoint(forward) if remat else forward, x, (self.layers, indices))

    def loss(self) -> tuple[Any, Any]:
        """The loss of the whole model, and `aux` or None, for others to differentiate."""
        x, _ = self.through(self.embed(self.rest), lambda x, aux: None, remat=True)
        return self.head(self.rest, x)

    def _key(self, index: Any) -> Any:
        return None if self.key is None else jax.random.fold_in(self.key, index)


def pair(result: Any, what: str, word: str) -> tuple[Any, Any]:
    """The two results of a user's function; TensorError where it returns something else."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TensorError(f"{what} must return two things, ({word}, aux), and returns something else")
    return result


def check_loss(loss: Any) -> None:
    """TensorError for anything but one real number."""
    if not hasattr(loss, "dtype") and not isinstance(loss, int | float):
        raise TensorError(
            f"the loss must be one real number, and is a {type(loss).__name__}: return it alone, or with has_aux=True "
            f"(loss, aux)"
        )
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TensorError(f"the loss must be one real number, and is {_described(loss)}: return its mean, for example")


def _described(array: Any) -> str:
    return f"{jnp.result_type(array)}{[*jnp.shape(array)]}"


class Pass:
    """A forward pass with its loss and aux, and a backward pass, in which layers are computed again."""

    def __init__(self, bound: Bound, mode: Mode) -> None:
        self._bound, self._mode = bound, mode
        with mode():
            start, self._back_embed = jax.vjp(bound.embed, bound.rest)
            end, (self.inputs, self.layer_aux) = bound.through(start, lambda x, aux: (x, aux))
            self.loss, self._back_head, self.aux = jax.vjp(bound.head, bound.rest, end, has_aux=True)

    def back(self, carry: Any, stack: Callable[[Any], Any], visit: Visit, wanted: Any = True) -> tuple[Any, Any]:
        """Through the layers from the last: the carried value in the end, and the gradient of `rest`.

        `stack` gives the layers' parameters from the carried value. If `wanted` is false, traced or not, no layer is
        visited, and the gradient means nothing.
        """
        with self._mode():
            rest, dx = self._back_head(jnp.ones_like(self.loss))
        last, shares = jnp.int32(self._bound.count - 1), self._bound.model.shares_rest

        def body(place: Any, carried: Any) -> Any:
            carry, dx, shared = carried
            index = last - place
            params, x = at((stack(carry), self.inputs), index)
            grads, dx, *more = self._layer_back(params, x, index, dx)
            return visit(index, grads, carry), dx, _sum(shared, *more) if shares else None

        trips = jnp.where(wanted, last + 1, jnp.int32(0))
        carry, dx, shared = jax.lax.fori_loop(jnp.int32(0), trips, body, (carry, dx, rest if shares else None))
        with self._mode():
            (more,) = self._back_embed(dx)
        return carry, _sum(shared if shares else rest, more)

    def _layer_back(self, params: Any, x: Any, index: Any, dx: Any) -> tuple[Any, ...]:
        primals = (params, x, self._bound.rest)[: 3 if self._bound.model.shares_rest else 2]

        def layer(params: Any, x: Any, rest: Any = None) -> Any:
            return self._bound.layer(params, x, rest, index)[0]

        with self._mode():
            return tuple(jax.vjp(layer, *primals)[1](dx))


def at(stack: Any, index: Any) -> Any:
    """One layer of a tree of stacks."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False), stack)


def _sum(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)
