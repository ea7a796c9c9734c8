"""The perturbed parameters of a model, the others with their reasons, and whether the model is still the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rulec.errors import HyperError, TensorError
from rulec.es.perturbation import Perturbation
from rulec.es.perturbations import Perturbations
from rulec.torch.es.self_estimator import SelfEstimator
from rulec.torch.tensors.tensors import DTYPES

#: Layers whose parameters are perturbed for all members at once.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)

#: The reasons of parameters that are not trained, and of those that no pattern is for.
FROZEN = "it needs no gradient"
NO_PATTERN = "no pattern matches it"

_KNOWN = "Linear, Conv1d, Conv2d and Embedding"


@dataclass(frozen=True)
class Use:
    """A parameter where a module has it."""

    module_name: str
    module: nn.Module
    name: str
    param: Tensor


@dataclass(frozen=True)
class Perturbed:
    """A perturbed parameter: its name in the model, its number, the modules that have it, and its pattern."""

    name: str
    number: int
    param: Tensor
    uses: tuple[Use, ...]
    pattern: str

    @property
    def is_self_estimated(self) -> bool:
        """Whether its module perturbs it by itself."""
        return any(_owns(use) for use in self.uses)

    @property
    def padding(self) -> int | None:
        """The line of an embedding that stands for nothing: it is not perturbed where it is looked up."""
        paddings = (use.module.padding_idx for use in self.uses if isinstance(use.module, nn.Embedding))
        return next((place for place in paddings if place is not None), None)

    @property
    def fixed(self) -> int | None:
        """The same line, where no other layer reads it: it is perturbed nowhere."""
        return self.padding if all(isinstance(use.module, nn.Embedding) for use in self.uses) else None


class PerturbedParameters:
    """The `perturbed` parameters of a model, in its order, and the names of others, `left_alone`, with the reason."""

    def __init__(self, model: nn.Module, perturbations: Perturbations) -> None:
        self.perturbed: list[Perturbed] = []
        self.left_alone: dict[str, str] = {}
        uses = _uses(model)
        readers = _read_without_call(model)
        for name, param in model.named_parameters():
            pattern = perturbations.pattern_of(name, ".")
            if pattern is None:
                self.left_alone[name] = NO_PATTERN
                continue
            reason = _reason(uses[id(param)], perturbations[pattern], readers)
            if reason is None:
                self.perturbed.append(Perturbed(name, len(self.perturbed), param, tuple(uses[id(param)]), pattern))
            else:
                self.left_alone[name] = reason
        perturbations.check_used({entry.pattern for entry in self.perturbed}, self.left_alone, ".")
        if not self.perturbed:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.left_alone.items()) or "it has no parameters"
            family = perturbations.population.family
            raise HyperError(f"nothing of {type(model).__name__} can be perturbed by {family!r} ({why})")
        self._seen = _signature(model)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The names of the layers that have perturbed parameters, in the model's order."""
        return tuple(dict.fromkeys(use.module_name for entry in self.perturbed for use in entry.uses))

    def check(self, model: nn.Module) -> None:
        """TensorError where the model has other parameters than before."""
        signature = _signature(model)
        if signature == self._seen:
            return
        for name in (*self._seen, *signature):
            if self._seen.get(name) != signature.get(name):
                what = "is new" if name not in self._seen else "is gone" if name not in signature else "is another one"
                raise TensorError(
                    f"parameter {name!r} {what} (its shape, dtype or whether it needs a gradient count too): "
                    f"the model has changed since it was perturbed, call rulec.torch.perturb again"
                )


def _signature(model: nn.Module) -> dict[str, tuple[object, ...]]:
    there = model.named_parameters(remove_duplicate=False)
    return {name: (id(p), tuple(p.shape), p.dtype, p.requires_grad) for name, p in there}


def _uses(model: nn.Module) -> dict[int, list[Use]]:
    uses: dict[int, list[Use]] = {}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            uses.setdefault(id(param), []).append(Use(module_name, module, name, param))
    return uses


def _read_without_call(model: nn.Module) -> dict[int, str]:
    """Layers that another module reads the parameters of without calling them."""
    inside = ((m, type(m).__name__) for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    return {id(child): kind for module, kind in inside for child in module.modules() if child is not module}


def _owns(use: Use) -> bool:
    return isinstance(use.module, SelfEstimator) and use.name in use.module.own_parameters()


def _reason(uses: list[Use], perturbation: Perturbation, readers: dict[int, str]) -> str | None:
    """Why a parameter is left alone; None where it is perturbed."""
    param = uses[0].param
    if not param.requires_grad:
        return FROZEN
    if isinstance(param, UninitializedParameter):
        return "it has no shape yet: run the model once before"
    if param.dtype not in DTYPES.values():
        return f"it is of {param.dtype}, none of {', '.join(DTYPES)}"
    if not param.numel():
        return "it has no elements"
    if perturbation.family == "spsa" or any(map(_owns, uses)):
        return None
    return next(_reasons(uses, perturbation, readers), None)


def _reasons(uses: list[Use], perturbation: Perturbation, readers: dict[int, str]) -> Iterator[str]:
    for use in uses:
        kind = type(use.module).__name__
        if not isinstance(use.module, LAYERS):
            yield f"{kind} is none of {_KNOWN}"
        if id(use.module) in readers:
            yield f"{readers[id(use.module)]} reads it without calling the layer"
        if isinstance(use.module, nn.Embedding) and use.module.max_norm is not None:
            yield "max_norm= makes the embedding write to it in each forward"
        if perturbation.family == "dropout":
            yield from _undroppable(use, perturbation)


def _undroppable(use: Use, perturbation: Perturbation) -> Iterator[str]:
    if use.param.dim() < 2 or isinstance(use.module, nn.Embedding):
        yield "dropout is of the inputs of Linear and convolutions"
        return
    columns = use.param.shape[1]
    try:
        if perturbation.kept_of(columns) == columns:
            yield f"of its {columns} inputs a share of {perturbation.keep} is all"
    except HyperError as error:
        yield str(error)
