"""Race tasks of the user in torch and JAX, as functions of NumPy arrays, and layers of a network for many runs at once.

In such layers, the first two axes of every array are learning rates and seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rulec.errors import RulecError

Array = np.ndarray[Any, Any]


def in_numpy(result: Any, task: str) -> Any:
    """A task's `(params, loss_and_grad[, held_out])` for what its function returned.

    A model of torch, or a tree of JAX arrays, comes with a function of the loss, whose gradients are taken here. What
    is neither is returned as it is. RulecError, naming the task, for one that cannot be raced.
    """
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not all(map(callable, result[1:])):
        return result
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(result[0], torch.nn.Module):
        return _TorchModel(torch, task, *result).functions()
    if jax is not None and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result[0])):
        return _in_jax(jax, task, *result)
    return result


class _TorchModel:
    """A model of torch whose parameters are written anew for every call."""

    def __init__(
        self, torch: Any, task: str, model: Any, loss: Callable[..., Any], held_out: Callable[..., Any] | None = None
    ) -> None:
        self.torch, self.task, self.model, self.loss, self.held_out = torch, task, model, loss, held_out
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def functions(self) -> tuple[Any, ...]:
        """The first parameters, the function of loss and gradients, and that of the held-out figure."""
        params = {name: self._array(name, parameter) for name, parameter in self.parameters.items()}
        functions = (self.loss_and_grad,) if self.held_out is None else (self.loss_and_grad, self.measure)
        return params, *functions

    def loss_and_grad(self, params: Mapping[str, Array], step: int, seed: int) -> tuple[float, dict[str, Array]]:
        """The loss of a step and its gradients. Random numbers of torch follow from the seed and the step."""
        torch = self.torch
        self._put(params)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed << 32) + step)
            loss = self.loss(self.model, step, seed)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise RulecError(
                f"the loss of {self.task} must return a tensor of one number that depends on the model's parameters"
            )
        grads = torch.autograd.grad(loss, [*self.parameters.values()], materialize_grads=True)
        self._check_buffers()
        return loss.item(), {name: grad.numpy() for name, grad in zip(self.parameters, grads, strict=True)}

    def measure(self, params: Mapping[str, Array]) -> float:
        """The held-out figure, in the model's evaluation mode."""
        assert self.held_out is not None
        self._put(params)
        self.model.eval()
        try:
            with self.torch.no_grad():
                return float(self.held_out(self.model))
        finally:
            self.model.train()

    def _put(self, params: Mapping[str, Array]) -> None:
        with self.torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.torch.tensor(params[name]))

    def _array(self, name: str, parameter: Any) -> Array:
        if parameter.device.type != "cpu" or parameter.dtype not in (self.torch.float32, self.torch.float64):
            raise RulecError(
                f"the parameter {name} of the task {self.task} must be in float32 or float64 on the processor, not in "
                f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
            )
        return np.array(parameter.detach().numpy())

    def _check_buffers(self) -> None:
        """RulecError where a loss changed a buffer: all runs and all rules share the model, except its parameters."""
        for name, buffer in self.model.named_buffers():
            if not self.torch.equal(buffer, self.buffers[name]):
                raise RulecError(
                    f"the buffer {name} of the model of {self.task} changes with each loss, and runs of a race differ "
                    f"in parameters alone: use a layer without running values"
                )


def _in_jax(
    jax: Any, task: str, tree: Any, loss: Callable[..., Any], held_out: Callable[..., Any] | None = None
) -> tuple[Any, ...]:
    """The same for a tree of JAX arrays, and a loss that is compiled."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in paths]
    compiled = jax.jit(jax.value_and_grad(loss))

    def together(params: Mapping[str, Array]) -> Any:
        return jax.tree.unflatten(treedef, [jax.numpy.asarray(params[name]) for name in names])

    def loss_and_grad(params: Mapping[str, Array], step: int, seed: int) -> tuple[Any, dict[str, Array]]:
        try:
            value, grads = compiled(together(params), step, seed)
        except TypeError as error:
            loss(together(params), step, seed)  # a mistake of another kind is the user's own error
            raise RulecError(
                f"the loss of {task} is compiled by jax.jit, where step and seed are traced numbers: draw a batch by "
                f"jax.random.fold_in(jax.random.key(seed), step) ({str(error).partition(chr(10))[0]})"
            ) from error
        return value, dict(zip(names, map(np.asarray, jax.tree.leaves(grads)), strict=True))

    params = {name: np.array(leaf) for name, (_, leaf) in zip(names, paths, strict=True)}
    if held_out is None:
        return params, loss_and_grad
    return params, loss_and_grad, lambda params: held_out(together(params))


def dense(values: Array, weight: Array, bias: Array) -> Array:
    """Rows times weights `(inputs, outputs)`, plus a bias."""
    return np.asarray(values @ weight + bias[..., None, :])


def dense_gradients(values: Array, error: Array) -> tuple[Array, Array]:
    """The gradients of a dense layer's weight and bias, from its rows and the gradient of its results."""
    return np.swapaxes(values, -1, -2) @ error, error.sum(axis=-2)


def back(error: Array, weight: Array) -> Array:
    """The gradient of a dense layer's rows."""
    return np.asarray(error @ np.swapaxes(weight, -1, -2))


def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """The mean cross entropy of each run in nats, float64, and its gradient by the logits.

    `logits` have shape (rates, seeds, rows, classes), `labels` (seeds, rows).
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=-1, keepdims=True)
    index = labels[None, ..., None]
    losses = np.log(total) - np.take_along_axis(shifted, index, -1)
    error = powers / total
    classes = np.arange(logits.shape[-1])
    error -= index == classes
    error /= labels.shape[-1]
    return np.asarray(losses.mean(axis=(-1, -2), dtype=np.float64)), error


def accuracy(logits: Array, labels: Array) -> Array:
    """The part of the rows with the label's logit as their largest, of each run."""
    return np.asarray((logits.argmax(axis=-1) == labels).mean(axis=-1))


def weights(rng: np.random.Generator, inputs: int, outputs: int, gain: float) -> Array:
    """Normal float32 weights `(inputs, outputs)` with a variance of `gain / inputs`."""
    values = rng.normal(size=(inputs, outputs)) * np.sqrt(gain / inputs)
    return np.asarray(values, np.float32)
