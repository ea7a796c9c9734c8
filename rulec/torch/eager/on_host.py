"""Updates on the host during the backward pass, and sums of gradients there, for an optimizer with `offload="step"`.

A gradient leaves the device as soon as it is complete, and its parameter is updated on the host while the backward pass
goes on. Gradients of micro-batches, and of rules that reduce over several tensors, are summed on the host until
`step()`. The step of such rules begins as gradients are complete: see `rulec.torch.offload.early`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.errors import HyperError, RulecError
from rulec.runtime.gradient_sums import Sums
from rulec.torch.eager.inner import Inner
from rulec.torch.offload.gradient_copies import DeviceGradients, GradientCopies, Work, buffer_size
from rulec.torch.offload.link import FakeLink, Link, host_of, link_of
from rulec.torch.offload.worker import worker_for
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import is_fake, plain_memory


class TorchSums(Sums[Any, Tensor]):
    """Sums of torch's gradients."""

    def _copied(self, grad: Tensor) -> Tensor:
        return grad.clone()

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float16, torch.bfloat16)

    def _widened(self, grad: Tensor) -> Tensor:
        return grad.to(torch.float32)

    def _rounded(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        with plain_memory():
            # Entries of one row are parts of a sum, each of which would be rounded.
            return (grad.coalesce() if grad.is_sparse else grad).to(dtype)


class HostSums(TorchSums):
    """Sums in host memory, by the indices of parameters."""

    def add(self, place: int, grad: Tensor) -> None:
        """Adds a gradient, which may be written to afterwards."""
        with plain_memory():
            host = host_of(grad)
            self._add(place, grad.to(host), grad.dtype, shared=grad.device.type != host.type)

    def keep(self, place: int, grad: Tensor) -> None:
        """Keeps a gradient, which nobody may write to."""
        self._add(place, grad, grad.dtype, shared=True)

    def is_wide(self, place: int) -> bool:
        """Whether a sum is rounded as it is taken."""
        return place in self._dtypes

    def take(self, place: int) -> Tensor:
        """Takes the sum of a parameter out."""
        grad = self.pop(place)
        assert grad is not None
        return grad


class HostGradients:
    """The gradients of a step that are kept on the host until `step()`, by the indices of parameters.

    They are sums until they are complete. With complete ones a step may begin: see `rulec.torch.offload.early`. `comes`
    says of an index whether its gradient is to be expected in this pass.
    """

    def __init__(self, inner: Inner, names: Sequence[str]) -> None:
        self._inner, self._names = inner, names
        self._sums = HostSums()
        self._complete: dict[int, Tensor] = {}
        self._rounded: set[int] = set()
        self.comes: Callable[[int], bool] = lambda place: True

    def __bool__(self) -> bool:
        return bool(self._sums or self._complete)

    def __contains__(self, place: int) -> bool:
        return place in self._sums or place in self._complete

    def add(self, places: Sequence[int], grads: Sequence[Tensor], arrived: bool = True) -> None:
        """Adds gradients, which may be written to afterwards.

        RulecError where a sum of more bits was rounded, since it seemed to be complete.
        """
        for place, grad in zip(places, grads, strict=True):
            if place in self._rounded:
                raise RulecError(
                    f"the gradient of {self._names[place]} arrived more often than expected in the last backward pass "
                    f"of several, and its sum was rounded before: it updated nothing; call relearn() and zero_grad(), "
                    f"and begin the step again"
                )
            before = self._complete.pop(place, None)
            if before is not None:
                self._sums.keep(place, before)
            self._sums.add(place, grad)

    def complete(self, places: Sequence[int], grads: Sequence[Tensor], arrived: bool) -> None:
        """Adds gradients with which their sums are complete, and begins the step where it may begin."""
        self.add(places, grads)
        for place in places:
            self._rounded |= {place} if self._sums.is_wide(place) else set()
            self._complete[place] = self._sums.take(place)
        self._inner.begin_early(self._complete, lambda place: place in self._sums or self.comes(place))

    def take(self, place: int) -> Tensor:
        """Takes the gradient of a parameter out."""
        return self._complete.pop(place) if place in self._complete else self._sums.take(place)


class HostUpdates:
    """The gradients of an eager optimizer's steps on their way to the host; `params` are its parameters, by index."""

    def __init__(self, inner: Inner, params: Sequence[Tensor]) -> None:
        self.inner, self._params = inner, params
        #: The indices of parameters that are updated with all others alone, in `step()`.
        self.joined = inner.joined
        self._copies = self._new_copies()

    def _new_copies(self) -> GradientCopies:
        options = self.inner.offload
        assert options is not None
        sizes: dict[torch.device, list[int]] = {}
        links: dict[torch.device, Link] = {}
        for param in map(local_tensor, self._params):
            sizes.setdefault(param.device, []).append(param.nbytes)
            if param.device not in links:
                fake = is_fake(param)
                links[param.device] = FakeLink(param.device) if fake else link_of(param.device, options.pinned)
        worker = worker_for(sizes)
        counts = {device: buffer_size(each, options.buffer) for device, each in sizes.items()}
        by_device = {device: DeviceGradients(links[device], count, worker) for device, count in counts.items()}
        return GradientCopies(by_device, worker)

    def look(self) -> None:
        """Takes over the devices of the parameters, and which of them are updated together."""
        self.joined = self.inner.joined
        if {local_tensor(param).device for param in self._params} != self._copies.devices:
            self._copies = self._new_copies()

    def send(self, place: int, grad: Tensor, work: Work, let_go: Callable[[], None]) -> None:
        """Has a parameter updated by `work`, with its complete gradient."""
        here = self.inner.conforming(place, grad)
        self.inner.announce(place)
        self._copies.take(place, here, work, let_go)

    def collect(self, place: int, grad: Tensor, work: Work, let_go: Callable[[], None]) -> None:
        """Has `work` keep a gradient, or a contribution to one."""
        self._copies.take(place, self.inner.conforming(place, grad), work, let_go)

    def settle(self) -> None:
        """Returns when all that was sent is done; devices wait for their new weights. Raises the error of an update."""
        self._copies.settle()
        self.inner.hold()

    def wait_for_devices(self) -> None:
        """Returns when devices have read the weights that are about to be overwritten."""
        self._copies.wait_for_devices()

    def stop(self) -> None:
        """Drops what has not begun, and returns when nothing runs."""
        self._copies.stop()
        self.inner.hold()


def check_offload(inner: Inner, *, journal: bool, folds: bool, epilogue: bool) -> None:
    """HyperError where steps on the host do not go together with another keyword."""
    for asked, keyword, why in (
        (journal, "journal=True", "keeps copies of weights on the device"),
        (folds, "accumulate='fold'", "adds gradients to states on their device"),
        (epilogue, "epilogue=", "updates weights on their device"),
    ):
        if asked and inner.offload is not None:
            raise HyperError(f"{keyword} {why}, and offload='step' updates on the host: leave one out")
