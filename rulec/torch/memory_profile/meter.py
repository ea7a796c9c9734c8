"""Training steps under a meter, which sees every tensor come and go and gives each its kind."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rulec.memory.live import Account, Timeline
from rulec.torch.classes import optimizer
from rulec.torch.tensors.fake import is_fake
from rulec.torch.tensors.tensors import DTYPES

#: Whose work makes temporaries: modules with these beginnings.
_OPTIMIZERS = ("rulec.torch.", "rulec.runtime.", "torch.optim.")
_MODELS = ("rulec.torch.memory_profile.",)

#: The module and functions that make transfer buffers.
_TRANSFERS = ("rulec.torch.offload.link", ("host_memory", "device_memory"))

#: Operations from gradients to a gradient: their sum, where a weight is used twice, and a copy of a held one.
_ADDS = (torch.ops.aten.add.Tensor,)
#: Copies that may be between devices, with the place of their source among the arguments.
_MOVES = {torch.ops.aten.copy_.default: 1, torch.ops.aten._to_copy.default: 0}
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.new_empty_strided.default)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of torch tensors, storage by storage, while it is entered.

    A storage counts from the operation that returns it until nothing holds it. The storages of `weights` and `buffers`
    are there from the beginning; what an operation takes inside itself, and gives back before it returns, is not seen.
    Fake tensors count with the memory that real ones would have. Tensors on a device of the type `host` are on the
    host, unless a weight is, too; all others are on the device. Tensors on `meta` have no memory where that is not the
    host.
    """

    def __init__(self, weights: Iterable[Tensor], buffers: Iterable[Tensor] = (), host: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._timeline = Timeline()
        weights = [*weights]
        #: The types of devices whose memory is the device's, as far as weights tell.
        self._devices, self._host = {weight.device.type for weight in weights}, host
        self._numbers: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize[Any, Any]] = {}
        self._made_from: dict[int, list[int]] = {}
        #: Of the last operation, where it is a sum that autograd would make in place: its result and first operand.
        self._sum: tuple[int, int] | None = None
        self._edges: list[Any] = []
        self._closed = False
        for tensor in (*weights, *buffers):
            self._see(tensor, "weights")
            if tensor.requires_grad:
                self._watch(tensor)

    def _watch(self, weight: Tensor) -> None:
        """Recognises what arrives at a weight as its gradient."""
        with torch.enable_grad():
            node = get_gradient_edge(weight).node
        self._edges.append((node, node.register_prehook(self._arrive)))

    def _arrive(self, grads: Iterable[Tensor | None]) -> None:
        """At a weight; where its gradient was never made, there is none."""
        for grad in grads:
            if grad is not None:
                self._is_gradient(grad)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._sum = None
        result = func(*args, **(kwargs or {}))
        maker = _maker()
        operands = self._operands((args, kwargs))
        if maker is None:
            self._hand_on(operands)
        if func in _MOVES:
            self._note_move(result, args[_MOVES[func]])
        for tensor in _tensors(result):
            if self._number(tensor) is None and self._counts(tensor):
                number = self._see(tensor, maker)
                self._note_origin(func, number, operands, maker is not None)
                if func in _ADDS and not args[0]._is_view() and torch._C._current_graph_task_id() != -1:
                    self._sum = number, operands[0]
        return result

    def _operands(self, tree: Any) -> list[int]:
        """The numbers of known storages of tensors; the size of one may have changed without an operation."""
        numbers = []
        for tensor in _tensors(tree):
            number = self._number(tensor)
            if number is not None:
                self._timeline.resized(number, tensor.untyped_storage().nbytes())
                numbers.append(number)
        return numbers

    def _note_move(self, result: Tensor, source: Any) -> None:
        """Counts the bytes of a copy between the device and the host."""
        if isinstance(source, Tensor) and self._on_host(source) is not self._on_host(result):
            self._timeline.copied(source.numel() * source.element_size(), down=self._on_host(result))

    def _see(self, tensor: Tensor, kind: str | None) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._timeline.born(storage.nbytes(), kind, self._on_host(tensor))
            finalizer = self._finalizers[number] = weakref.finalize(storage, self._freed, key, number)
            finalizer.atexit = False
        return number

    def _on_host(self, tensor: Tensor) -> bool:
        if self._host == "meta" and not is_fake(tensor):  # such as step counts beside fake states
            return tensor.device.type == "cpu"
        return tensor.device.type == self._host and self._host not in self._devices

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory somewhere."""
        return tensor.device.type != "meta" or "meta" in (self._host, *self._devices)

    def _freed(self, key: int, number: int) -> None:
        del self._numbers[key], self._finalizers[number]
        if not self._closed:
            # Autograd adds in place where nothing else holds what it adds to; under a mode it makes a new tensor.
            into = self._sum[0] if self._sum is not None and number == self._sum[1] else None
            self._sum = None
            self._timeline.died(number, into)

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    # What a storage is for

    def _hand_on(self, operands: Iterable[int]) -> None:
        """Counts a tensor that the optimizer allocated and the model keeps as model memory."""
        for number in operands:
            if self._timeline.kind(number) == "temporaries":
                self._timeline.becomes(number, None)

    def _note_origin(self, func: Any, number: int, operands: list[int], inside: bool) -> None:
        if inside:
            return
        if func in _ADDS:
            self._made_from[number] = operands
        elif func in _COPIES and operands and self._timeline.kind(operands[0]) == "gradients":
            self._timeline.becomes(number, "gradients")

    def _is_gradient(self, tensor: Tensor) -> None:
        number = self._number(tensor)
        if number is None:
            number = self._see(tensor, "gradients")
        parts = self._mark(number)
        if parts > 1:
            self._timeline.joins(number, parts)

    def _mark(self, number: int) -> int:
        """Marks a gradient and its summands; the number of summands."""
        if self._timeline.kind(number) not in (None, "temporaries", "gradients"):
            return 0
        self._timeline.becomes(number, "gradients")
        return sum(map(self._mark, self._made_from.pop(number, ()))) or 1

    # What was found

    def know(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Takes in tensors of a kind that are there from the beginning."""
        for tensor in tensors:
            if self._number(tensor) is None and self._counts(tensor):
                self._see(tensor, kind)

    def begin(self) -> None:
        """Peaks, and the bytes of copies, count from here on."""
        for number, finalizer in [*self._finalizers.items()]:
            alive = finalizer.peek()
            if alive is not None:
                self._timeline.resized(number, alive[0].nbytes())
        self._timeline.begin()

    def account(self, state: Iterable[Tensor]) -> Account:
        """The peaks since `begin`; `state` are the tensors that the optimizer keeps. Counting ends."""
        for tensor in state:
            number = self._number(tensor)
            number = self._see(tensor, "state") if number is None else number
            if self._timeline.kind(number) != "weights":
                self._timeline.becomes(number, "state")
        self._closed = True
        for _, handle in self._edges:
            handle.remove()
        self._edges.clear()
        return self._timeline.account()


def state_of(optimizer: Any) -> Iterator[Tensor]:
    """Every tensor that an optimizer keeps for its parameters and groups."""
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for leaf in tree_leaves([dict(v) if isinstance(v, Mapping) else v for v in optimizer.state.values()]):
        if isinstance(leaf, Tensor) and id(leaf) not in params:
            yield leaf
    for group in optimizer.param_groups:
        yield from (v for v in group.values() if isinstance(v, Tensor))


def _tensors(tree: Any) -> list[Tensor]:
    """The strided tensors in a tree, whose storages can be asked for."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.layout is torch.strided]


def _maker() -> str | None:
    """The kind of an operation's results where an optimizer's code calls the operation, else None.

    A mode that looks at an operation on its way calls nothing.
    """
    frame = sys._getframe(2)
    while frame is not None:
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if name.startswith(_OPTIMIZERS) and not name.startswith(_MODELS) and function != "__torch_dispatch__":
            return "transfers" if name == _TRANSFERS[0] and function in _TRANSFERS[1] else "temporaries"
        frame = frame.f_back  # type: ignore[assignment]
    return None


#: How weights are updated: in the step, in the backward pass, or in the products that would make their gradients.
Way = Literal["deferred", "eager", "epilogue"]
WAYS: tuple[Way, ...] = ("deferred", "eager", "epilogue")

#: Steps before the one that counts: states are made in the first, and the second may do what the first has learned.
BEFORE = 2


@dataclass(frozen=True)
class Training:
    """A training to account for: `model` makes the model in a dtype, and `batch` its arguments; then the rule (its name
    or itself), its hyper-parameters, the dtype of its states (by default the weights'), the kind of its weights, and
    what is offloaded, with the bytes of a transfer buffer."""

    model: Callable[..., nn.Module]
    batch: Callable[[str], tuple[Tensor, ...]]
    rule: Any
    hyper: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    state_dtype: str | None = None
    weights: str | None = None
    offload: str | None = None
    offload_buffer: int | None = None

    @property
    def storage(self) -> dict[str, Any]:
        """The keywords of an optimizer for what it stores, as far as they are given."""
        keywords = ("state_dtype", "weights", "offload", "offload_buffer")
        return {keyword: value for keyword in keywords if (value := getattr(self, keyword)) is not None}


def account(training: Training, way: Way, fake: bool = True, before: int = BEFORE) -> Account:
    """The memory kept by one training step, after `before` other steps.

    Fake tensors are not computed and take no memory. The work between the kernels of a rule then counts as torch's
    operations on a device; on the CPU it would be NumPy's, and no meter of torch's sees NumPy. An offload of fake
    tensors is from a device; that of real ones is from the CPU to itself, and all is one place.
    """
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        host = "meta" if fake and training.offload is not None else "cpu"
        model = training.model(dtype=DTYPES[training.dtype], device="cpu")
        meter = stack.enter_context(Meter(model.parameters(), model.buffers(), host))
        opt, step = stepping(model, training, way)
        for number in range(before + 1):
            if number == before:
                meter.begin()
            step()
        peaks: Account = meter.account(state_of(opt))
        return peaks


def stepping(model: nn.Module, training: Training, way: Way) -> tuple[Any, Callable[[], None]]:
    """An optimizer of the model, and what takes one training step."""
    if way == "deferred":
        plain = optimizer(training.rule)(model.parameters(), **training.hyper, **training.storage)

        def deferred() -> None:
            model(*training.batch(training.dtype)).backward()
            plain.step()
            plain.zero_grad()

        return plain, deferred
    from rulec.torch.eager import EagerUpdate

    keywords: dict[str, Any] = {**training.hyper, **training.storage}
    opt = EagerUpdate(model, training.rule, epilogue=way == "epilogue", **keywords)

    def eager() -> None:
        loss = model(*training.batch(training.dtype))
        with opt.backward():
            loss.backward()
        opt.step()
        opt.zero_grad()

    return opt, eager


def tokens(batch: int, length: int) -> Callable[[str], tuple[Tensor, ...]]:
    """Tokens for a language model, of `(batch, length)`."""
    return lambda dtype: (torch.zeros(batch, length, dtype=torch.int64),)


def rows(batch: int, width: int) -> Callable[[str], tuple[Tensor, ...]]:
    """Inputs of `(batch, width)`."""
    return lambda dtype: (torch.ones(batch, width, dtype=DTYPES[dtype]),)
