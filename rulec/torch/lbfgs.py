"""`rulec.torch.LBFGS`: several evaluations in a step, a search along each direction, and torch's keywords and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from rulec.locks import Lockable, synchronized
from rulec.runtime.lbfgs import Progress, Settings, descend
from rulec.torch.groups.interface import torch_words
from rulec.torch.groups.routes import names_of
from rulec.torch.optimizer import check_groups_match, iterable, saved_groups
from rulec.torch.states.saved import asks_for_states
from rulec.torch.step.evaluations import Before
from rulec.torch.tensors.dtensor import is_dtensor
from rulec.torch.tensors.memory import check_gradient_memory, check_memory, check_state_memory
from rulec.torch.tensors.tensors import check_parameters

#: What torch calls the parts of a `Progress`.
_NAMES = {
    "evaluations": "func_evals", "iterations": "n_iter", "direction": "d", "step": "t", "gradient_changes": "old_dirs",
    "changes": "old_stps", "weights": "ro", "scale": "H_diag", "gradient": "prev_flat_grad", "loss": "prev_loss",
}  # fmt: skip


class LBFGS(Optimizer, Lockable):
    """The L-BFGS method of Liu and Nocedal, under torch's keywords.

    A step evaluates the model several times: `step(closure)` needs a closure that does zero_grad(), the forward and the
    backward pass, and returns the loss. The iterates equal torch's, and a checkpoint of either class loads in the
    other. All parameters are one vector, in one group. An error puts the parameters back to where they were before the
    step, also one in the closure.

    Args:
        params: parameters or named parameters to optimize, all on one device
        lr: the first step to try along a direction, 1 by default
        max_iter: iterations in a step, 20 by default
        max_eval: number of evaluations that ends a step, max_iter*5//4 by default; a search may make one more
        tolerance_grad: ends a step where no element of the gradient is larger, 1e-7 by default
        tolerance_change: ends a step where the loss, or every parameter, changed by less, 1e-9 by default
        history_size: number of pairs of changes, of parameters and gradients, 100 by default
        line_search_fn: None for steps of lr, `strong_wolfe`, `zoom`, or `backtracking` (Armijo), None by default
        offload: None alone: any other value is a HyperError, for the history stays on the device
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1, max_iter: int = 20, max_eval: int | None = None,
        tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9, history_size: int = 100,
        line_search_fn: str | None = None, *, offload: None = None,
    ) -> None:  # fmt: skip
        if offload is not None:
            raise HyperError(
                f"LBFGS evaluates the model again in a step, with its history on the device, which offload={offload!r} "
                f"does not move: leave offload out, and give a smaller history_size where memory lacks"
            )
        settings: dict[str, Any] = {
            "lr": lr, "max_iter": max_iter, "max_eval": max_eval, "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change, "history_size": history_size, "line_search_fn": line_search_fn,
        }  # fmt: skip
        settings["max_eval"] = _settings(settings).evaluations
        super().__init__(iterable(params), settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Takes the only group; HyperError for a second one, for the parameters are one vector."""
        super().add_param_group(param_group)
        try:
            self._check()
        except BaseException:
            self.param_groups.pop()
            raise

    def _check(self) -> Settings:
        """The settings; an error where no step could be taken."""
        if len(self.param_groups) != 1:
            raise HyperError(
                f"LBFGS takes one group of parameters, for they are one vector, and has {len(self.param_groups)}: "
                f"give all parameters in one, or make an optimizer for each"
            )
        params, names = self._params, names_of(self.param_groups)
        check_parameters(params, names)
        for param, name in zip(params, names, strict=True):
            if is_dtensor(param):
                raise TensorError(f"{name} is a DTensor, which LBFGS cannot take: give it whole parameters")
            if param.device != params[0].device:
                raise TensorError(
                    f"{names[0]} is on {params[0].device} and {name} on {param.device}, and LBFGS makes one vector of "
                    f"them: make an optimizer for each device"
                )
        return _settings(self.param_groups[0])

    @property
    def _params(self) -> list[Tensor]:
        params: list[Tensor] = self.param_groups[0]["params"]
        return params

    @_disable_dynamo
    @torch.no_grad()
    @synchronized
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of up to `max_iter` iterations. Returns the loss of before it, the first of `closure`."""
        if closure is None and not self.state and asks_for_states(self.param_groups):
            return None
        if closure is None:
            raise RulecError(
                "LBFGS evaluates the model again in a step: give step() a closure that does zero_grad(), the forward "
                "and the backward pass, and returns the loss"
            )
        settings = self._check()
        saved = self.state[self._params[0]]
        for key, value in saved.items():
            for vector in value if isinstance(value, list) else (value,):
                check_state_memory(vector, f"{key} of LBFGS")
        known = {ours: saved[theirs] for ours, theirs in _NAMES.items() if theirs in saved}
        space = _Vectors(self._params, names_of(self.param_groups), closure, known.get("direction"))
        before = space.copies()
        try:
            loss, progress = descend(space, Progress(**known), settings)
        except BaseException:
            space.put_back(before)
            raise
        saved.update(_saved(progress))
        return loss  # type: ignore[no-any-return]

    @synchronized
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`, of this class or of `torch.optim.LBFGS`."""
        loaded: dict[str, Any] = {}

        def check(_: Optimizer, saved: dict[str, Any]) -> None:
            loaded.update(self._checked(saved))

        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch gives vectors the dtype of the first parameter.
        self.state.clear()
        if loaded:
            self.state[self._params[0]] = loaded

    def _checked(self, saved: Any) -> dict[str, Any]:
        """The state in a `state_dict()`, copied; StateMismatch where it belongs to other parameters."""
        groups = saved_groups(saved)
        check_groups_match(self.param_groups, groups, "optimizer's", "parameters")
        _settings({**self.defaults, **groups[0]})
        states = saved["state"]
        if not states:
            return {}
        state = next(iter(states.values()))
        return _saved(Progress.of(state if len(states) == 1 else {}, _NAMES, self._here))

    def _here(self, value: Any, key: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        numel = sum(_real(p).numel() for p in self._params)
        if value.dim() and value.shape != (numel,):
            raise StateMismatch(
                f"{key} was saved with shape {tuple(value.shape)}, where the parameters have {numel} elements in all"
            )
        return value.detach().to(self._params[0].device, copy=True)


def _saved(progress: Progress) -> dict[str, Any]:
    """A progress under torch's names; before the first iteration there are counts alone."""
    names = list(_NAMES.items())[: None if progress.iterations else 2]
    return {theirs: getattr(progress, ours) for ours, theirs in names}


def _settings(values: Mapping[str, Any]) -> Settings:
    """The settings in a group; HyperError for a value that means nothing."""
    known = {key: values[key] for key in Settings.__dataclass_fields__}
    lr = known["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise HyperError(f"Tensor lr must be 1-element, and lr of LBFGS has shape {tuple(lr.shape)}")
        known["lr"] = lr.item()
    try:
        return Settings(**known)
    except HyperError as error:
        words = torch_words("LBFGS", "lr", lr) if str(error).startswith("LBFGS has lr=") else ""
        raise HyperError(f"{error}{words}") from None


def _real(tensor: Tensor) -> Tensor:
    """The same numbers, complex ones as pairs."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _kind(param: Tensor) -> tuple[Any, ...]:
    return param.shape, param.dtype, param.device, is_dtensor(param)


def _vector_kind(vector: Tensor) -> str:
    return f"{vector.numel()} numbers of {vector.dtype} on {vector.device}"


class _Vectors:
    """The parameters of a closure as one vector; `last` is the direction of before, where there is one."""

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], closure: Callable[[], float], last: Tensor | None
    ) -> None:  # fmt: skip
        self._params, self._names, self._closure, self._last = [*params], names, closure, last
        self._kinds = [*map(_kind, self._params)]

    def evaluate(self) -> tuple[Any, Any]:
        with torch.enable_grad():
            loss = self._closure()
        for param, kind, name in zip(self._params, self._kinds, self._names, strict=True):
            if _kind(param) != kind:
                raise TensorError(
                    f"{name} was given another shape, dtype or device in the closure of LBFGS: change it between steps"
                )
            check_memory(param, name)
            if param.grad is not None:
                check_gradient_memory(param.grad, name)
        if loss is None:
            raise RulecError("the closure of LBFGS returned None: let it return the loss")
        if all(p.grad is None for p in self._params):
            raise RulecError("the closure of LBFGS left no parameter with a gradient: let it do the backward pass")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self._params]
        gradient = torch.cat([_real(grad).reshape(-1) for grad in grads])
        now, before = _vector_kind(gradient), None if self._last is None else _vector_kind(self._last)
        if before not in (None, now):
            raise StateMismatch(
                f"LBFGS remembers vectors of {before}, and its gradients are {now}: make it anew, or load a state of "
                f"these parameters"
            )
        return loss, gradient

    def move(self, step: float, direction: Tensor) -> None:
        start = 0
        for param in map(_real, self._params):
            part = direction[start : start + param.numel()].view_as(param)
            param.add_(part, alpha=step)
            start += param.numel()

    def copies(self) -> Before:
        return Before(self._params, self._names, {})

    def put_back(self, copies: Before) -> None:
        copies.put_back({})

    def add(self, vector: Tensor, scale: Tensor, other: Tensor) -> None:
        vector.add_(other, alpha=scale)  # type: ignore[arg-type]
