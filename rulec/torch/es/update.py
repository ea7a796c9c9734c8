"""One update: from the fitness of members to gradients, or to a step without them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.errors import HyperError
from rulec.es.binary.fitness import member_weights
from rulec.es.fitness import Shaping, Weights, weights
from rulec.es.perturbations import Perturbations
from rulec.es.report import Report, skipped
from rulec.torch.es.fused import fused_step
from rulec.torch.es.model import Perturbed
from rulec.torch.es.noise.base import Source
from rulec.torch.es.noise.build import Noises
from rulec.torch.es.self_estimating import SelfEstimators

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Estimating:
    """The estimates from given fitness, by (sign, direction).

    Raises TensorError or HyperError for what is bad before anything is written.
    """

    def __init__(
        self, perturbations: Perturbations, perturbed: Sequence[Perturbed], noises: Noises, estimators: SelfEstimators,
        fitness: Floats, shaping: Shaping, penalty: tuple[float, float] = (0.0, 0.0),
    ) -> None:  # fmt: skip
        self._perturbations, self._perturbed, self._noises = perturbations, perturbed, noises
        self._estimators = estimators
        self._shaping, self._penalty = shaping, penalty
        estimators.check_penalty(penalty)
        self._fitness = fitness
        self._weights: Weights = weights(fitness, perturbations.population, shaping, perturbations)

    def update(self) -> Report:
        """Sets gradients."""
        if self._weights.empty:
            return self._skip()
        estimates = self._module_estimates()
        for entry in self._perturbed:
            entry.param.grad = self._gradient(entry, estimates)
        return self._report(gradient_bytes=self._gradient_bytes(self._perturbed))

    def step(self, opt: Any) -> Report:
        """Takes a step of the optimizer, by noise where its kernels make it, else by gradients, freed afterwards."""
        held = self._held(opt)
        if self._weights.empty:
            return self._skip()
        estimates, sources = self._module_estimates(), self._sources(held)
        by_param = {entry.param: entry for entry in held}
        for entry in self._perturbed:
            entry.param.grad = None
        for param in by_param.keys() - sources.keys():
            param.grad = self._gradient(by_param[param], estimates)
        fused = fused_step(opt, sources, lambda param: self._gradient(by_param[param], estimates))
        report = self._report([e.name for e in held if e.param in fused], self._gradient_bytes(held))
        for entry in self._perturbed:
            entry.param.grad = None
        return report

    def _held(self, opt: Any) -> list[Perturbed]:
        """The perturbed parameters of the optimizer; HyperError where there are none."""
        groups = getattr(opt, "param_groups", None)
        if groups is None or not callable(getattr(opt, "step", None)):
            raise HyperError(f"a step is taken by an optimizer, with param_groups and step(), not by {opt!r}")
        if _needs_closure(opt):
            raise HyperError(
                f"es.step cannot step {type(opt).__name__}: its step() evaluates a closure with gradients of its own, "
                f"which an evolution strategy has none of; give an optimizer that steps from .grad, such as Adam"
            )
        there = {id(param) for group in groups for param in group["params"]}
        held = [entry for entry in self._perturbed if id(entry.param) in there]
        if not held:
            raise HyperError("the optimizer has none of the perturbed parameters: give it es.parameters.values()")
        return held

    @torch.no_grad()
    def _sources(self, held: Sequence[Perturbed]) -> dict[Tensor, Source]:
        """The sources of gradients for kernels that take them, by parameter."""
        sources: dict[Tensor, Source] = {}
        for entry in held:
            param = entry.param
            if entry.is_self_estimated or entry.fixed is not None:
                continue
            if not self._noises.used(param) or not param.is_contiguous():
                continue
            noise = self._noises.of(entry)
            one = noise.source(self._weights.of(noise.perturbation))
            if one is not None:
                sources[param] = one
        return sources

    def _skip(self) -> Report:
        report = skipped(self._noises.step, self._weights.dropped, self._fitness.size, stacklevel=4)
        for entry in self._perturbed:
            entry.param.grad = None
        return report

    def _module_estimates(self) -> dict[int, Tensor]:
        """The estimates of modules that make their own."""
        if not self._estimators.modules:
            return {}
        mine = member_weights(self._fitness, self._shaping)
        return self._estimators.gradients(self._perturbations, self._noises.step, mine, self._penalty)

    @torch.no_grad()
    def _gradient(self, entry: Perturbed, estimates: dict[int, Tensor]) -> Tensor | None:
        """A parameter's estimate, in its dtype; None where no forward came by it."""
        param = entry.param
        if entry.is_self_estimated:
            return estimates[id(param)].to(param.dtype)
        if not self._noises.used(param):
            return None
        noise = self._noises.of(entry)
        gradient: Tensor = noise.estimate(self._weights.of(noise.perturbation), param)
        if entry.fixed is not None:
            gradient[entry.fixed] = 0.0
        return gradient.to(param.dtype)

    def _report(self, fused: Sequence[str] = (), gradient_bytes: int = 0) -> Report:
        unused = (e.name for e in self._perturbed if not e.is_self_estimated and not self._noises.used(e.param))
        return Report(
            self._noises.step, self._weights.counted, self._weights.dropped, unused=tuple(unused), fused=tuple(fused),
            gradient_bytes=gradient_bytes,
        )  # fmt: skip

    def _gradient_bytes(self, entries: Sequence[Perturbed]) -> int:
        return sum(e.param.grad.nbytes for e in entries if e.param.grad is not None)


def _needs_closure(opt: Any) -> bool:
    """Whether an optimizer's step cannot do without a closure, as that of torch.optim.LBFGS."""
    closure = inspect.signature(opt.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
