"""`rulec.array.GradStore`: gradients of several backward passes, summed until the one step that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from rulec.array.checks import flatten
from rulec.errors import RulecError, TensorError
from rulec.locks import lock_of, synchronized
from rulec.runtime.gradient_sums import Sums


class Steps(Protocol):
    """An optimizer: it takes steps by gradients by name, whole ones or, while one is open, layer by layer."""

    @property
    def in_partial(self) -> bool: ...
    def update(self, layer: str, grad: Any) -> None: ...
    def step(self, grads: Any) -> None: ...


class GradStore(Sums[str, Any]):
    """Gradients by the name of their array, from backward passes over parts of a network.

    If two passes give one array a gradient, as with shared weights, the store has the sum: a rule that is not linear
    in the gradient takes one step from it, not two. `step` updates arrays of an optimizer and lets their gradients go.

        grads = GradStore()
        grads.extend({"head": by_head, "embed": by_output})
        grads.extend({"embed": by_input})
        grads.step(opt)
    """

    def __init__(self, grads: Any = None) -> None:
        super().__init__()
        if grads is not None:
            self.extend(grads)

    @synchronized
    def extend(self, grads: Any, layer: str | int | None = None) -> None:
        """Adds gradients, or another store's, to the sums. `layer` says where in the parameters they belong.

        None among them adds nothing. Arrays are copied: a layer may write its next gradient into the same one. Those
        of 16 bits are summed in float32, and the sum is rounded once as it is read. TensorError, and nothing added,
        where one has another shape or dtype than the sum so far.
        """
        prefix = "" if layer is None else f"{layer}/"
        sums = grads if isinstance(grads, GradStore) else None
        grads_by_name = flatten(grads if sums is None else sums._held, prefix)
        new = {name: grad for name, grad in grads_by_name.items() if grad is not None}
        dtypes = {name: _dtype_of(name, grad) for name, grad in new.items()}
        if sums is not None:
            dtypes = {name: sums._dtype(key) for name, key in zip(new, [*sums._held], strict=True)}
        for name, grad in new.items():
            self._check_alike(name, grad, dtypes[name])
        for name, grad in new.items():
            with _there(grad):
                self._add(name, grad, dtypes[name])
        self._note_peak()

    def _check_alike(self, name: str, grad: Any, dtype: Any) -> None:
        """TensorError where a gradient cannot be added to what is there."""
        if name not in self._held:
            return
        facts = ("shape", self._held[name].shape, grad.shape), ("dtype", self._dtype(name), dtype)
        for fact, before, now in facts:
            if before != now:
                raise TensorError(f"a gradient of {name} has {fact} {now}, where the store has one of {before}")

    def _copied(self, grad: Any) -> Any:
        return grad.copy(order="K")

    def _is_narrow(self, dtype: Any) -> bool:
        return dtype.name in ("float16", "bfloat16")

    def _widened(self, grad: Any) -> Any:
        return grad.astype("float32")

    def _rounded(self, grad: Any, dtype: Any) -> Any:
        with _there(grad):
            return grad.astype(dtype)

    @synchronized
    def step(self, opt: Steps, layer: str | int | None = None) -> None:
        """Updates the arrays that have gradients here, of one layer or of all, and lets each gradient go.

        Inside `with opt.partial():` these are a part of the open step, otherwise a step of their own. Errors are as in
        `Optimizer.update` and `Optimizer.step`; gradients that were not used stay in the store.
        """
        with lock_of(opt):
            self._step(opt, layer)

    def _step(self, opt: Steps, layer: str | int | None) -> None:
        names = [name for name in self._held if layer is None or name == str(layer) or name.startswith(f"{layer}/")]
        if opt.in_partial:
            for name in names:
                opt.update(name, self[name])
                self._drop(name)
            return
        if layer is not None:
            raise RulecError(f"step(opt, {layer!r}) is one part of a step: call it inside `with opt.partial():`")
        opt.step({name: self[name] for name in names})
        for name in names:
            self._drop(name)


def _dtype_of(name: str, grad: Any) -> Any:
    """The dtype of an array; TensorError for anything else."""
    if not hasattr(grad, "dtype") or not hasattr(grad, "copy"):
        raise TensorError(f"the gradient of {name} is a {type(grad).__name__}, and a store has arrays")
    return grad.dtype


def _there(array: Any) -> AbstractContextManager[Any]:
    """Surrounds work on an array: with CuPy its GPU is the current one, where copies are made."""
    return array.device if hasattr(array.device, "__enter__") else nullcontext()


def copied(tree: Any) -> Any:
    """Nested arrays in memory of their own; what is no array stays as it is."""
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [copied(value) for value in tree]
    if not hasattr(tree, "copy"):
        return tree
    with _there(tree):
        return tree.copy(order="K")
