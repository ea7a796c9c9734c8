"""All members in one forward: while it runs, layers with perturbed parameters compute what each member's layer would.

Nothing of the model is touched. torch's calls of operations are intercepted: an operation on a perturbed parameter is
replaced, whoever calls it, and is an error where it cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rulec.errors import RulecError, TensorError
from rulec.torch.es.layers import Convolution, Linear, Map
from rulec.torch.es.model import Perturbed
from rulec.torch.es.noise.base import AddedNoise
from rulec.torch.es.noise.build import Noises
from rulec.torch.es.noise.independent import Independent
from rulec.torch.es.population import Marked, Population, added, combined, whole


class Members(TorchFunctionMode):
    """Entered for one forward of a batch; `marked` is the batch in which all members see the same, if it is one."""

    def __init__(self, noises: Noises, who: Population, marked: Marked | None) -> None:
        super().__init__()
        self._noises, self._who, self._marked = noises, who, marked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, or its replacement for all members."""
        kwargs = kwargs or {}
        check = _CHECKS.get(func)
        if check is not None:
            check(self._who, *args, **kwargs)
        there = [e for e in map(self._noises.entry, _flat(args, kwargs)) if e is not None]
        if not there:
            return func(*args, **kwargs)
        way = _WAYS.get(func)
        if way is not None:
            return way(self, *args, **kwargs)
        result = func(*args, **kwargs)
        if self._reads(func, args) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            _refuse(func, there[0])
        return result

    def _reads(self, func: Any, args: Any) -> bool:
        """Whether an operation reads elements of a perturbed parameter among its arguments."""
        return func not in _LIKE and not (func in _AS and self._noises.entry(args[0]) is None)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Replaces F.linear."""
        return self._run(Linear(), input, weight, bias, least=2)

    def conv1d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        """Replaces F.conv1d."""
        return self._run(Convolution(F.conv1d, (stride, padding, dilation), groups), input, weight, bias, least=3)

    def conv2d(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        """Replaces F.conv2d."""
        return self._run(Convolution(F.conv2d, (stride, padding, dilation), groups), input, weight, bias, least=4)

    def _run(self, way: Map, x: Tensor, weight: Tensor, bias: Tensor | None, least: int) -> Tensor:
        """A layer with a weight, a bias or both perturbed, in the dtype of an autocast if there is one."""
        of_weight, of_bias = self._noises.entry(weight), self._noises.entry(bias)
        name = self._name(of_weight or of_bias)
        if x.dim() < least:
            raise TensorError(f"{name} sees a tensor of {x.dim()} dimensions, where the first of {least} is the batch")
        lines = self._lines(x, name)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            lines, weight, bias = lines.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            plain = bias if of_bias is None else None
            if of_weight is None:
                out = way.product(lines, weight, plain)
            else:
                noise = self._noises.of(of_weight)
                out = noise.apply(lines, weight, plain, way, self._who.under(noise.perturbation))
            if of_bias is not None and bias is not None:
                out = added(out, way.spread(self._biases(of_bias, bias), out), self._who)
            return whole(out, self._who).flatten(0, 2)

    def _biases(self, entry: Perturbed, bias: Tensor) -> Tensor:
        """Every member's bias, (signs, 1, directions, outputs)."""
        noise = self._noises.of(entry)
        assert isinstance(noise, Independent)
        vectors, scales = noise.of_bias().to(bias.dtype), self._who.under(noise.perturbation).scales
        return torch.stack([torch.add(bias, vectors, alpha=scale) for scale in scales]).unsqueeze(1)

    def embedding(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
        """Replaces F.embedding."""
        entry = self._noises.entry(weight)
        if entry is None:
            raise TensorError("an embedding's indices cannot be a perturbed parameter")
        if input.dim() < 1:
            raise TensorError(f"{self._name(entry)} sees a single index, where the first dimension is the batch")
        index = self._lines(input, self._name(entry))
        each = index.expand(*index.shape[:2], self._who.directions, *index.shape[3:])
        noise = self._noises.of(entry)
        assert isinstance(noise, AddedNoise)
        lines = noise.lookup(each).to(weight.dtype)
        if entry.padding is not None:
            lines = lines.masked_fill_((each == entry.padding).unsqueeze(-1), 0.0)
        who = self._who.under(noise.perturbation)
        return whole(combined(F.embedding(index, weight), lines, who), who).flatten(0, 2)

    def _lines(self, x: Tensor, name: str) -> Tensor:
        """The tensor by signs, repeats and directions, with axes of 1 where it is known that members see the same."""
        lines = self._who.split(x, name)
        return lines[:1, :, :1] if self._marked is not None and self._marked.has(x) else lines

    def _name(self, entry: Perturbed | None) -> str:
        assert entry is not None
        return f"layer {entry.uses[0].module_name!r}" if entry.uses[0].module_name else "the layer"


def _flat(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    """Arguments, and what is in lists among them."""
    for value in (*args, *kwargs.values()):
        yield from value if isinstance(value, list | tuple) else (value,)


#: Operations that ask all tensors for their shape and dtype alone, and those that ask all but the first.
_LIKE = frozenset([
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
])  # fmt: skip
_AS = frozenset([Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as])


def _refuse(func: Any, entry: Perturbed) -> NoReturn:
    raise RulecError(
        f"parameter {entry.name!r} is read by {getattr(func, '__name__', func)} outside of a layer, where members "
        f"cannot have their own: freeze it (requires_grad_(False)) before perturbing, or use es.evaluate"
    )


def _check_normalization(who: Population, *args: Any, training: bool = False, **_: Any) -> None:
    if args[5] if len(args) > 5 else training:
        raise RulecError("a batch norm in training mode mixes members: call eval() on it, or use a group norm")


def _check_attention(who: Population, query: Tensor, *_: Any, **__: Any) -> None:
    # Attention is over the first dimension here, whatever batch_first: the module has turned the tensors by now.
    if query.dim() != 3 or query.shape[1] != who.rows:
        raise RulecError(
            f"attention over a tensor of shape {tuple(query.shape)}, as (length, batch, features), mixes members of a "
            f"batch of {who.rows} rows: give MultiheadAttention batch_first=True, or its input the batch second"
        )


_CHECKS: dict[Any, Callable[..., None]] = {
    F.batch_norm: _check_normalization, F.multi_head_attention_forward: _check_attention,
}  # fmt: skip

_WAYS: dict[Any, Callable[..., Tensor]] = {
    F.linear: Members.linear, F.conv1d: Members.conv1d, F.conv2d: Members.conv2d, F.embedding: Members.embedding,
}  # fmt: skip
