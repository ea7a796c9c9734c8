"""`rulec.array.GradStore`: gradients of several backward passes, summed until the one step that uses them."""

from __future__ import annotations

from typing import Any, Protocol

from rulec.array.checks import flatten
from rulec.errors import RulecError, TensorError
from rulec.runtime.sums import Sums
from rulec.runtime.turns import in_turn, turn_of


class Steps(Protocol):
    """An optimizer: it takes steps by gradients by name, whole ones or, while one is open, layer by layer."""

    @property
    def in_partial(self) -> bool: ...
    def update(self, layer: str, grad: Any) -> None: ...
    def step(self, grads: Any) -> None: ...


class GradStore(Sums[str, Any]):
    """Gradients by the name of their array, from backward passes over parts of a network.

    Where two passes give one array a gradient, as with shared weights, the store has the sum: a rule that is not linear
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

    @in_turn
    def extend(self, grads: Any, layer: str | int | None = None) -> None:
        """Adds gradients, or another store's, to the sums. `layer` says where in the parameters they belong.

        None among them adds nothing. Arrays given are kept, not copied, and never written to. TensorError, and nothing
        added, where one has another shape or dtype than the sum so far.
        """
        prefix = "" if layer is None else f"{layer}/"
        grads_by_name = flatten(grads._held if isinstance(grads, GradStore) else grads, prefix)
        new = {name: grad for name, grad in grads_by_name.items() if grad is not None}
        for name, grad in new.items():
            _check_alike(name, self._held.get(name), grad)
        for name, grad in new.items():
            self._add(name, grad)
        self._note_peak()

    @in_turn
    def step(self, opt: Steps, layer: str | int | None = None) -> None:
        """Updates the arrays that have gradients here, of one layer or of all, and lets each gradient go.

        Inside `with opt.partial():` these are a part of the open step, otherwise a step of their own. Errors are as in
        `Optimizer.update` and `Optimizer.step`; gradients that were not used stay in the store.
        """
        with turn_of(opt):
            self._step(opt, layer)

    def _step(self, opt: Steps, layer: str | int | None) -> None:
        names = [name for name in self._held if layer is None or name == str(layer) or name.startswith(f"{layer}/")]
        if opt.in_partial:
            for name in names:
                opt.update(name, self._held[name])
                self.pop(name)
            return
        if layer is not None:
            raise RulecError(f"step(opt, {layer!r}) is one part of a step: call it inside `with opt.partial():`")
        opt.step(self._held)
        self._held, self._writable = {}, set()


def _check_alike(name: str, held: Any, grad: Any) -> None:
    """TensorError where a gradient cannot be added to what is there."""
    if held is None:
        return
    for fact in ("shape", "dtype"):
        before, now = getattr(held, fact, None), getattr(grad, fact, None)
        if before != now:
            raise TensorError(f"a gradient of {name} has {fact} {now}, where the store has one of {before}")
