"""Eager steps in JAX: through equal layers with stacked parameters, and of any model in one compiled function.

With stacks, each layer is updated as the backward pass leaves it. The backward pass is one loop that carries the stacks
of parameters and states and writes each layer's new values where its old ones were. So there is one layer's gradient at
a time, and no second copy of a stack. For any model, gradient and update are in one function, so that XLA drops each
gradient by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rulec.errors import StateMismatch, TensorError
from rulec.functional.plan import StepPlan
from rulec.jax.compiled import call
from rulec.jax.eager.call import Eager, EagerRun, Outcome, UserFunction, unless
from rulec.jax.eager.layers import Split, Stacks, listed, stacked
from rulec.jax.eager.memory import bytes_of, residual_bytes, shape_of
from rulec.jax.eager.model import Bound, Model, Pass, check_loss, pair
from rulec.jax.eager.parts import Subtree
from rulec.jax.eager.tied import Tied, tied_in
from rulec.jax.leaves import Tree
from rulec.jax.oriented import Axes
from rulec.jax.recipe import Rules
from rulec.language.statistics import Watch


class ScanState(NamedTuple):
    """The state of a rule: `layers`, with all arrays stacked as the layers are, and `rest`, of other parameters."""

    layers: Any
    rest: Any


def eager_scan(
    layer: Callable[..., Any], head: Callable[..., Any], rule: Rules, *, embed: Callable[..., Any] | None = None,
    has_aux: bool = False, layer_aux: bool = False, state_dtype: Any = None, weights: str = "",
    maximize: bool = False, seed: int = 0, tags: Mapping[str, Collection[str]] | None = None,
    shared: Mapping[str, str] | None = None, most: int | None = None, skip_nonfinite: bool = False,
    watch: Watch | None = None,
) -> EagerScan:  # fmt: skip
    """A step of a model of equal layers in which each layer is updated inside of the backward pass.

    Parameters are `{"layers": stacked, "rest": tree}`: every array of `layers` has the layers as its first axis, and
    `rest` is everything else. `embed(rest, batch)` gives the input of the first layer, by default `batch[0]`.
    `layer(params, x)` gives the input of the next layer, in the shapes and dtypes of `x`, and `head(rest, x, batch)`
    the loss. Any of the three may name `key` among its parameters, a layer `rest`, `batch` and `index` too. With
    `has_aux` the head returns `(loss, aux)`, with `layer_aux` a layer `(x, aux)`.

    Each layer's arrays are tensors of their own, for rules that reduce over a tensor too. `rule` and the other keywords
    are as for `rulec.jax.transform`, and `weights` as for `rulec.jax.init`. `shared` is leaf path -> path of the
    leaf it is tied to. `most` is the largest number of bytes beside weights, state and batch: a larger step raises
    StepTooLarge before it is done.
    With `skip_nonfinite` a step with a gradient that is not finite changes nothing, and its `Outcome.ok` is False.
    RuleError for a rule that reads other tensors than it updates, and for `watch`: no statistics are measured here.
    """
    model = Model(embed, layer, head, has_aux, layer_aux)
    return EagerScan(
        model,
        rule,
        state_dtype=state_dtype,
        weights=weights,
        maximize=maximize,
        seed=seed,
        tags=tags,
        shared=shared,
        most=most,
        skip_nonfinite=skip_nonfinite,
        watch=watch,
    )


class EagerScan(Eager):
    """A step of a model of equal layers; `rulec.jax.eager_scan` makes one."""

    def __init__(self, model: Model, rule: Rules, **keywords: Any) -> None:
        super().__init__(rule, **keywords)
        self.model = model

    def loss(self, params: Any, batch: Any, *, key: Any = None) -> Any:
        """The loss of the model, or with `has_aux` `(loss, aux)`, for evaluation or another kind of training."""
        loss, aux = Bound(self.model, params["layers"], params["rest"], batch, key).loss()
        return (loss, aux) if self.model.has_aux else loss

    def listed(self, params: Any, state: ScanState) -> tuple[Any, Any]:
        """Parameters with a list of layers, and their state, as for `rulec.jax.step` and `rulec.jax.save`.

        All arrays of layers are copies. A parameter that stands twice is None at the second place.
        """
        run, shared = self._run_for(params)
        return call(run.listed, shared.once(params), state)  # type: ignore[no-any-return]

    def stacked(self, params: Any, state: Any) -> tuple[Any, ScanState]:
        """The inverse of `listed`: from parameters with a list of layers and a state of `rulec.jax.step`."""
        run, shared = self._run_for(stacked(params))
        params, new_state = call(run.stacked, params, state)
        return shared.everywhere(params), new_state

    def _run_for(self, params: Any) -> tuple[_ScanRun, Tied]:
        shared = tied_in(self._checked(params), self._shared)
        run, _ = self._run({}, None, shared)
        assert isinstance(run, _ScanRun)
        return run, shared

    def _new_run(self, *common: Any) -> EagerRun:
        return _ScanRun(self.model, *common)

    def _checked(self, params: Any) -> Any:
        if not isinstance(params, Mapping) or {*params} != {"layers", "rest"}:
            kind = f"a dict of {[*params]}" if isinstance(params, Mapping) else f"a {type(params).__name__}"
            raise TensorError(
                f'parameters of eager_scan are {{"layers": stacked, "rest": whatever else there is}}, not {kind}'
            )
        counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params["layers"])}
        if len(counts) != 1 or counts & {(), (0,)}:
            sizes = " and ".join(sorted(str(*count) if count else "no axis" for count in counts)) or "no arrays"
            raise TensorError(f"all arrays of layers must have the layers as their first axis, and there are {sizes}")
        return params

    def _count(self, state: Any) -> Any:
        if not isinstance(state, ScanState):
            raise StateMismatch(f"the state is a {type(state).__name__}, not what init of eager_scan returned")
        return state.layers.count


class _ScanRun(EagerRun):
    """The functions of a model and a rule."""

    def __init__(self, model: Model, *common: Any) -> None:
        super().__init__(*common)
        self.model = model

    def kept(self, params: Any, batch: Any, key: Any) -> tuple[int, int]:
        """The inputs of all layers, and the gradients of two."""
        x = call(lambda: jax.eval_shape(self._inputs, params, batch, key))
        layers = bytes_of(params["layers"])
        return bytes_of(x), 2 * layers // jax.tree.leaves(params["layers"])[0].shape[0]

    def _inputs(self, *operands: Any) -> Any:
        return Pass(self._bound(*operands), self.mode).inputs

    def _init(self, params: Any, numbers: Any) -> ScanState:
        layers, rest, plans = self._planned(params)

        def first(one_layer: Any) -> Any:
            return self.parts.first(layers._replace(tree=one_layer), plans, numbers)

        return ScanState(jax.vmap(first)(params["layers"]), self.parts.first(rest, plans, numbers))

    def listed(self, params: Any, state: ScanState) -> tuple[Any, Any]:
        """Parameters and their state as one tree with a list of layers."""
        split, trees = self._split(params)
        pairs = zip((state.layers, state.rest), trees, strict=True)
        values = [self.parts.fields.unpacked(part, tree, self.parts.recipe.title) for part, tree in pairs]
        tree = listed(params)
        return tree, self.parts.fields.packed(split.joined(*values), self.parts.tree(Subtree("", tree)))

    def stacked(self, params: Any, state: Any) -> tuple[Any, ScanState]:
        """The inverse of `listed`."""
        whole = self.parts.fields.unpacked(state, self.parts.tree(Subtree("", params)), self.parts.recipe.title)
        params = stacked(params)
        split, trees = self._split(params)
        pairs = zip(split.parted(whole), trees, strict=True)
        return params, ScanState(*(self.parts.fields.packed(values, tree) for values, tree in pairs))

    def _split(self, params: Any) -> tuple[Split, list[Tree]]:
        layer, rest = self._planned(params)[2]
        count = jax.tree.leaves(params["layers"])[0].shape[0]
        return Split(layer, rest, count), [self.parts.tree(Subtree(name, params[name])) for name in ("layers", "rest")]

    def _planned(self, params: Any) -> tuple[Subtree, Subtree, list[StepPlan]]:
        """One layer, by its shapes, and the rest; their plans."""
        one = jax.tree.map(lambda stack: shape_of(stack.shape[1:], stack.dtype), params["layers"])
        layers, rest = Subtree("layers", one), Subtree("rest", params["rest"])
        plans = [self.parts.planned(part) for part in (layers, rest)]
        self.parts.check([name for part in (layers, rest) for name in self.parts.tree(part).whole.names], plans)
        return layers, rest, plans

    def _step(
        self, params: Any, state: ScanState, batch: Any, key: Any, numbers: Any, inputs: Any
    ) -> tuple[Any, ScanState, Outcome]:
        layers, rest, plans = self._planned(params)
        forward = Pass(self._bound(params, batch, key), self.mode)
        ok = None
        if self.measured:
            known = self._known(forward, params["layers"])
            inputs, ok = {**inputs, **self.measured.inputs(known)}, self.measured.ok(known)
        arguments = self.parts.arguments(numbers, inputs, plans)
        stacks, wanted = Stacks(self.parts, layers, arguments), True if ok is None else ok
        carried = params["layers"], state.layers
        carried, grads = forward.back(carried, lambda stacks: stacks[0], stacks.replaced, wanted)
        new = self.parts.moved(rest, grads, state.rest, arguments, _leaves_of(params["layers"]))
        new_rest, rest_state = unless(ok, (params["rest"], state.rest), new)
        outcome = Outcome(forward.loss, forward.aux, forward.layer_aux, ok)
        return {"layers": carried[0], "rest": new_rest}, ScanState(carried[1], rest_state), outcome

    def _known(self, forward: Pass, layers: Any) -> Any:
        """The measured reductions, from a backward pass that updates nothing."""
        known, grads = forward.back(
            self.measured.nothing(), lambda known: layers, lambda index, grads, known: self.measured.more(known, grads)
        )
        return self.measured.more(known, grads)

    def _bound(self, params: Any, batch: Any, key: Any) -> Bound:
        whole = self.shared.apart(params)
        return Bound(self.model, params["layers"], params["rest"], batch, key, *whole)


def _leaves_of(stacks: Any) -> int:
    """The number of leaves of all layers together, which is the number of the first leaf of the rest."""
    leaves = jax.tree.leaves(stacks)
    return len(leaves) * int(leaves[0].shape[0])


def eager_step(
    loss: Callable[..., Any], rule: Rules, *, has_aux: bool = False, state_dtype: Any = None, weights: str = "",
    maximize: bool = False, seed: int = 0, tags: Mapping[str, Collection[str]] | None = None,
    shared: Mapping[str, str] | None = None, most: int | None = None, skip_nonfinite: bool = False,
    watch: Watch | None = None, axes: Axes = None,
) -> EagerStep:  # fmt: skip
    """A step of a model in which a gradient is used up as soon as it is complete.

    `loss(params, batch)` gives the loss, or with `has_aux` `(loss, aux)`; it may name `key` among its parameters.
    Loops over layers in it should be Python's: a loop of JAX gives the gradients of all layers together, and
    `rulec.jax.eager_scan` is for it. `axes` has the roles of axes, as for `rulec.jax.transform`. The other keywords are
    as for `eager_scan`.
    """
    return EagerStep(
        loss,
        rule,
        has_aux,
        state_dtype=state_dtype,
        weights=weights,
        maximize=maximize,
        seed=seed,
        tags=tags,
        shared=shared,
        most=most,
        skip_nonfinite=skip_nonfinite,
        watch=watch,
        axes=axes,
    )


class EagerStep(Eager):
    """A step of a model; `rulec.jax.eager_step` makes one. States are as from `rulec.jax.init`."""

    def __init__(self, loss: Callable[..., Any], rule: Rules, has_aux: bool, **keywords: Any) -> None:
        super().__init__(rule, **keywords)
        self._loss, self._has_aux = UserFunction(loss, "loss", ["key"]), has_aux

    def _new_run(self, *common: Any) -> EagerRun:
        return _StepRun(self._loss, self._has_aux, *common)

    def _checked(self, params: Any) -> Any:
        return params

    def _count(self, state: Any) -> Any:
        if not hasattr(state, "count"):
            raise StateMismatch(f"the state is a {type(state).__name__}, not what init of eager_step returned")
        return state.count


class _StepRun(EagerRun):
    """The functions of a loss and a rule."""

    def __init__(self, loss: UserFunction, has_aux: bool, *common: Any) -> None:
        super().__init__(*common)
        self._loss, self._has_aux = loss, has_aux

    def kept(self, params: Any, batch: Any, key: Any) -> tuple[int, int]:
        """The bytes of all activations for the backward pass, and of the two largest gradients."""
        with self.mode():
            activations = residual_bytes(lambda *operands: self._loss_of(*operands)[0], params, batch, key)
        largest = sorted((bytes_of(leaf) for leaf in jax.tree.leaves(params)), reverse=True)
        return activations, sum(largest[:2])

    def _loss_of(self, params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        result = self._loss(self.shared.everywhere(params), batch, key=key)
        loss, aux = pair(result, "the loss", "loss") if self._has_aux else (result, None)
        check_loss(loss)
        return loss, aux

    def _init(self, params: Any, numbers: Any) -> Any:
        part, plans = self._planned(params)
        return self.parts.first(part, plans, numbers)

    def _planned(self, params: Any) -> tuple[Subtree, Any]:
        part = Subtree("", params)
        plans = [self.parts.planned(part)]
        self.parts.check(self.parts.tree(part).whole.names, plans)
        return part, plans

    def _step(
        self, params: Any, state: Any, batch: Any, key: Any, numbers: Any, inputs: Any
    ) -> tuple[Any, Any, Outcome]:
        part, plans = self._planned(params)
        with self.mode():
            loss, back, aux = jax.vjp(lambda params: self._loss_of(params, batch, key), params, has_aux=True)
            (grads,) = back(jnp.ones_like(loss))
        ok = None
        if self.measured:
            known = self.measured.more(self.measured.nothing(), grads)
            one = self.measured.one(known, state.count).astype(loss.dtype)
            with self.mode():
                (grads,) = back(one)
            inputs, ok = {**inputs, **self.measured.inputs(known)}, self.measured.ok(known)
        arguments = self.parts.arguments(numbers, inputs, plans)
        new = self.parts.moved(part, grads, state, arguments, 0)
        return *unless(ok, (params, state), new), Outcome(loss, aux, ok=ok)
