"""Updates in the epilogue of the products that gradients are: such a gradient never exists as a whole."""

from __future__ import annotations

from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from rulec.backend.product import Product
from rulec.errors import HyperError, RulecError
from rulec.runtime.buckets.runtime_launch import Launch
from rulec.runtime.stages.noise import takes_blocks
from rulec.torch.eager.epilogue_layers import Kept, make_gradient
from rulec.torch.eager.epilogue_tiles import ProductCalls, Way
from rulec.torch.eager.hooks import hears_alone
from rulec.torch.eager.on_gradient import Firing, Window
from rulec.torch.eager.wrapped import ForeignInner, Inner, PartitionedInner
from rulec.torch.step.machine import Machine
from rulec.torch.tensors.tensors import dtype_name


class Owner(Protocol):
    """The passes of an eager optimizer: the one that is running, or None."""

    window: Window | None


class Epilogue:
    """The updates of weights of linear layers, whose gradients are products.

    A weight is updated by its gradient's factors where its whole gradient of the step is one product; in the first
    step, which is watched, and wherever there is more to a gradient, it is made as ever. It holds no reference to the
    optimizer.
    """

    def __init__(self, owner: Owner, inner: Inner, model: Any, way: Way | bool | nn.Module) -> None:
        if isinstance(way, nn.Module):
            model, way = way, True
        if way is not True and way not in get_args(Way):
            raise HyperError(f"epilogue={way!r} must be True, False, a model or one of {', '.join(get_args(Way))}")
        if not isinstance(model, nn.Module):
            raise HyperError("epilogue=True is for the linear layers of a model: give it the model, epilogue=model")
        if isinstance(inner, ForeignInner):
            kind = type(inner.optimizer).__name__
            raise HyperError(f"epilogue=True needs a rule, which can be printed into a product, and {kind} is none")
        self._calls = ProductCalls("auto" if way is True or way is False else way)
        params = [p for group in inner.optimizer.param_groups for p in group["params"]]
        self._kept = Kept(owner, _keeps, model, params)

    @property
    def weights(self) -> list[Tensor]:
        """The weights that may be updated so."""
        return [layer.weight for layer in self._kept.layers]

    def arrived(self, window: Window, place: int) -> bool:
        """Updates a parameter whose gradient arrived as a product; False where it is in `.grad`, made if need be."""
        param = window.step.roster.params[place]
        products = self._kept.take(param)
        if not products:
            return False
        if not hears_alone(param):
            raise RulecError(
                f"a hook was registered on {window.step.roster.names[place]} after a part of its gradient had come: "
                f"register it before the backward pass"
            )
        machine, home = _home(window.step.inner, place)
        whole = _completed(window, param) if len(products) == 1 else None
        launch = _launch(machine, home) if whole is not None else None
        if launch is None or whole is None:
            make_gradient(param, products)
            return False
        whole.take(place, lambda: self._update(machine, launch, param, products[0]))
        return True

    def _update(self, machine: Machine, launch: Launch, param: Tensor, product: Product) -> int:
        """Writes the parameter and its states; the bytes of the gradient that there were at once."""
        with machine.plain():
            room = self._calls.give(launch, product)
            machine.writer.write([launch], [param])
        return room

    def clear(self) -> None:
        """Forgets what was kept, as where a backward pass has failed."""
        self._kept.clear()

    def close(self) -> None:
        """Gives the layers their own forward back."""
        self._kept.close()


def _keeps(owner: Owner, weight: Tensor) -> bool:
    """Whether the factors of a weight's gradient are kept: the update can be made of them, if nothing else comes."""
    window = _completed(owner.window, weight)
    if window is None:
        return False
    machine, place = _home(window.step.inner, window.step.roster.places[id(weight)])
    home = machine.home(place)
    if home is None:
        return False
    bucket = home[0].tensors[home[1]].bucket
    same = bucket is not None and bucket.layout.dtype("g") == dtype_name(weight.dtype)
    return same and bucket is not None and takes_blocks(bucket)


def _completed(window: Window | None, weight: Tensor) -> Firing | None:
    """The pass in which the next arrival of a weight's gradient is all of it, and updates it; None where it is not."""
    if not isinstance(window, Firing) or weight.grad is not None or _is_distributed():
        return None
    place = window.step.roster.places.get(id(weight))
    return window if place is not None and window.completes(place) else None


def _home(inner: Inner, place: int) -> tuple[Machine, int]:
    """The machine that has the parameter at this place, and its place there."""
    while isinstance(inner, PartitionedInner):
        number, place = inner._homes[place]
        inner = inner._inner[number]
    return inner.optimizer._machine, place


def _launch(machine: Machine, place: int) -> Launch | None:
    """What updates the parameter at this place alone, with a gradient still to be given; None where it takes none."""
    machine.check_undisturbed((place,))
    home = machine.home(place)
    if home is None:
        return None
    engine, tensor_id = home
    # Of the gradient only shape and dtype are looked at.
    shape = torch.empty_like(machine.params[place], device="meta", requires_grad=False)
    (launch,) = engine.ready((tensor_id,), [shape], engine.table)
    return launch if takes_blocks(launch.version) else None


def _is_distributed() -> bool:
    """Whether gradients are summed over processes: then they must be made."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
