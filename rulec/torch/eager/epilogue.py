"""Updates fused into the products that compute gradients: the gradient of a linear layer never exists as a whole.

The gradient of a linear layer's weight is a product of two factors: the gradients of the layer's outputs, and its
inputs. Here the backward pass keeps the factors, and the update computes the gradient in tiles. The factors arrive
where the gradient would have: autograd runs a parameter's hooks once it has all contributions of one backward pass,
with no gradient where every contribution was kept.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as graph_task
from torch._C import _will_engine_execute_node as will_execute
from torch.nn import functional

from rulec.backend.capabilities import Product
from rulec.errors import HyperError, RulecError
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.noise import takes_blocks
from rulec.torch.eager.epilogue_tiles import ProductCalls, Way
from rulec.torch.eager.hooks import hears_alone
from rulec.torch.eager.inner import Inner, PartitionedInner
from rulec.torch.eager.on_gradient import BackwardHandler, Firing
from rulec.torch.eager.wrapped import ForeignInner
from rulec.torch.step.optimizer_step import OptimizerStep
from rulec.torch.tensors.fake import is_fake, resolved
from rulec.torch.tensors.memory import check_holds
from rulec.torch.tensors.tensors import dtype_name


class Owner(Protocol):
    """The passes of an eager optimizer: the one that is running, or None."""

    handler: BackwardHandler | None


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

    def arrived(self, handler: BackwardHandler, place: int) -> bool:
        """Updates a parameter whose gradient arrived as a product; False where it is in `.grad`, made if need be."""
        param = handler.step.parameter_index.params[place]
        products = self._kept.take(param)
        if not products:
            return False
        name = handler.step.parameter_index.names[place]
        for product in products:
            _check_factors(product, name)
        if not hears_alone(param):
            raise RulecError(
                f"a hook was registered on {name} "
                "after a part of its gradient had come: "
                f"register it before the backward pass"
            )
        machine, tensor_ref = _home(handler.step.inner, place)
        whole = _completed(handler, param) if len(products) == 1 else None
        launch = _launch(machine, tensor_ref) if whole is not None else None
        if launch is None or whole is None:
            make_gradient(param, products)
            return False
        whole.take(place, lambda: self._update(machine, launch, param, products[0]))
        return True

    def _update(self, machine: OptimizerStep, launch: Launch, param: Tensor, product: Product) -> int:
        """Writes the parameter and its states; returns the bytes of the gradient that were held at once."""
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


def _check_factors(product: Product, name: str) -> None:
    """TensorError where a factor of the gradient of a parameter of this name lacks memory."""
    for factor in (product.outputs, product.inputs):
        check_holds(factor, f"a factor of the gradient of {name}", "free it after the backward pass")


def _keeps(owner: Owner, weight: Tensor) -> bool:
    """Whether the factors of a weight's gradient are kept: the update can be made of them, if nothing else comes."""
    handler = _completed(owner.handler, weight)
    if handler is None:
        return False
    machine, place = _home(handler.step.inner, handler.step.parameter_index.places[id(weight)])
    tensor_ref = machine.tensor_ref(place)
    if tensor_ref is None:
        return False
    bucket = tensor_ref[0].tensors[tensor_ref[1]].bucket
    same = bucket is not None and bucket.layout.dtype("g") == dtype_name(weight.dtype)
    return same and bucket is not None and takes_blocks(bucket)


def _completed(handler: BackwardHandler | None, weight: Tensor) -> Firing | None:
    """The pass in which the next arrival of a weight's gradient is all of it, and updates it; None where it is not."""
    if not isinstance(handler, Firing) or weight.grad is not None or _is_distributed():
        return None
    place = handler.step.parameter_index.places.get(id(weight))
    return handler if place is not None and handler.completes(place) else None


def _home(inner: Inner, place: int) -> tuple[OptimizerStep, int]:
    """The optimizer step that has the parameter with this index, and its index in it."""
    while isinstance(inner, PartitionedInner):
        number, place = inner._tensor_refs[place]
        inner = inner._inner[number]
    return inner.optimizer._machine, place


def _launch(machine: OptimizerStep, place: int) -> Launch | None:
    """The launch that updates this parameter alone, still without a gradient; None where it takes no gradient."""
    machine.check_undisturbed((place,))
    tensor_ref = machine.tensor_ref(place)
    if tensor_ref is None:
        return None
    engine, tensor_id = tensor_ref
    # Of the gradient only shape and dtype are looked at.
    shape = torch.empty_like(machine.params[place], device="meta", requires_grad=False)
    (launch,) = engine.ready((tensor_id,), [shape], engine.table)
    return launch if takes_blocks(launch.version) else None


def _is_distributed() -> bool:
    """Whether gradients are all-reduced: then they must be computed."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


_FACTORS = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Kept:
    """The linear layers of a model whose weights are updated by the factors of gradients, and the kept factors.

    `params` are updated by `owner`, to which no reference is held; `keeps(owner, weight)` decides in the backward pass
    whether the factors of a weight's gradient are kept. Until `close`, or as long as the owner lives, the layers have a
    forward of their own, which computes the same.
    """

    def __init__(
        self, owner: Any, keeps: Callable[[Any, Tensor], bool], model: nn.Module, params: Collection[Tensor]
    ) -> None:
        self._owner, self._keeps = weakref.ref(owner), keeps
        # By the backward pass as well: of one that failed nothing may come into the next.
        self._products: dict[tuple[int, Tensor], list[Product]] = {}
        chosen = {id(p) for p in params}
        self.layers = [layer for layer in suitable_layers(model) if id(layer.weight) in chosen]
        for layer in self.layers:
            layer.forward = _Forward(layer, self)  # type: ignore[method-assign]
        self.close = weakref.finalize(owner, _give_back, self.layers)

    def keep(self, weight: Tensor, product: Product) -> bool:
        """Takes one contribution to the gradient of a weight; False where it must be made."""
        owner = self._owner()
        if owner is None or torch.is_grad_enabled() or not hears_alone(weight) or not self._keeps(owner, weight):
            return False
        self._products.setdefault((graph_task(), weight), []).append(product)
        return True

    def take(self, weight: Tensor) -> list[Product]:
        """Removes and returns the kept factors of a weight's gradient in this backward pass, in order."""
        return self._products.pop((graph_task(), weight), [])

    def clear(self) -> None:
        """Forgets all contributions, as where a backward pass has failed."""
        self._products.clear()


def _give_back(layers: Sequence[nn.Linear]) -> None:
    """Gives layers the forward of their class back."""
    for layer in layers:
        if isinstance(layer.__dict__.get("forward"), _Forward):
            del layer.forward


def make_gradient(weight: Tensor, products: Collection[Product]) -> None:
    """Adds what was kept to a weight's gradient, as autograd would have."""
    with torch.no_grad(), _plain_products(weight.device.type):
        for product in products:
            gradient = (product.outputs.t() @ product.inputs).to(weight.dtype)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def suitable_layers(model: nn.Module) -> list[nn.Linear]:
    """The plain linear layers of a model whose weights nobody else has, in its order."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            owners[id(param)] = owners.get(id(param), 0) + 1
    return [layer for layer in model.modules() if _plain(layer) and owners[id(layer.weight)] == 1]  # type: ignore[misc]


def _plain(layer: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing more, with a weight that kernels can take in tiles."""
    if type(layer) is not nn.Linear or not _own_forward(layer):
        return False
    weight = layer.weight
    if not _ordinary(weight) or not weight.requires_grad or not hears_alone(weight):
        return False
    return weight.layout is torch.strided and weight.dtype in _FACTORS and weight.is_contiguous()


def _ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, with memory or fake, and no subclass that means something else."""
    return type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor)


def _own_forward(layer: nn.Linear) -> bool:
    """Whether a layer has its class's forward; a copy of a layer with another forward has that set on itself."""
    forward = layer.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is nn.Linear.forward


class _Forward:
    """The forward of one layer. A copy of the layer, and one that was saved, has its class's own."""

    def __init__(self, layer: nn.Linear, kept: Kept) -> None:
        self.layer, self.kept = layer, kept

    def __call__(self, input: Tensor) -> Tensor:
        """The layer's outputs."""
        layer = self.layer
        dtype = _product_dtype(input, layer.weight)
        if dtype is None or not _is_plain_call(input, layer.weight):
            return functional.linear(input, layer.weight, layer.bias)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        flat = input.to(dtype).reshape(-1, input.shape[-1])
        outputs: Tensor = _Linear.apply(flat, layer.weight, bias, self.kept)  # type: ignore[no-untyped-call]
        return outputs.reshape(*input.shape[:-1], outputs.shape[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of_class, (self.layer,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _forward_of_class(memo[id(self.layer)])


def _forward_of_class(layer: nn.Linear) -> Any:
    return types.MethodType(nn.Linear.forward, layer)


def _plain_products(device: str) -> AbstractContextManager[Any]:
    """A context in which products have the dtype of their factors."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _product_dtype(input: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of the layer's products: that of autocast, where it is on, else of both; None where not ours."""
    device = input.device.type
    if input.dtype not in _FACTORS or weight.dtype not in _FACTORS:
        return None
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return input.dtype if input.dtype == weight.dtype else None


def _is_plain_call(input: Tensor, weight: Tensor) -> bool:
    """Whether autograd alone looks on, at tensors like any other."""
    if not (torch.is_grad_enabled() and weight.requires_grad) or torch.compiler.is_compiling():
        return False
    if not _ordinary(input) or input.dim() < 2 or input.device != weight.device:
        return False
    return not (torch._C._get_tracing_state() or torch._C._are_functorch_transforms_active())


class _Linear(torch.autograd.Function):
    """A linear layer of a matrix of inputs, whose weight is cast to their dtype."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        # Of a tensor that was saved, what is recomputed in its place may come back: the hooks are the parameter's.
        ctx.kept, ctx.weight = kept, weight
        with _plain_products(inputs.device.type):
            return functional.linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        with _plain_products(inputs.device.type):
            # Of the weight as it is before its update.
            of_inputs = outputs.mm(weight.to(outputs.dtype)) if wants[0] else None
            of_bias = outputs.sum(0) if wants[2] else None
            of_weight = None
            if wants[1] and _is_made(ctx, Product(resolved(outputs), resolved(inputs))):
                of_weight = outputs.t().mm(inputs).to(weight.dtype)
        return of_inputs, of_weight, of_bias, None


def _is_made(ctx: Any, product: Product) -> bool:
    """Whether the weight's gradient is made: not where its factors are kept, nor where this pass has no use for it."""
    accumulator = ctx.next_functions[1][0]
    try:
        accumulates = will_execute(accumulator)
    except RuntimeError:  # torch.autograd.grad, which is to return this gradient: torch does not answer there
        return True
    return accumulates and not ctx.kept.keep(ctx.weight, product)
