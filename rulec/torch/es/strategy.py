"""`perturb`: an evolution strategy for a model of PyTorch, whose members are evaluated in one forward pass.

Warnings about a perturbed model are here too: of noise lost in rounding, and of layers without perturbation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rulec.errors import HyperError, RulecError, TensorError
from rulec.es import perturbation
from rulec.es.fitness import Report, Shaping
from rulec.es.perturbation import Perturbation, numbers, tiled
from rulec.es.perturbations import Perturbations
from rulec.es.strategy_state import StrategySteps
from rulec.locks import lock_of, synchronized
from rulec.torch.es.batched import Members
from rulec.torch.es.model import FROZEN, Perturbed, PerturbedParameters
from rulec.torch.es.noise.build import Noises
from rulec.torch.es.population import Marked, population_of
from rulec.torch.es.self_estimating import SelfEstimators
from rulec.torch.es.single import OneMember, check_mixing, check_modules, uncompiled
from rulec.torch.es.update import Estimating
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import is_fake, resolved
from rulec.torch.tensors.tensors import dtype_name


def perturb(model: nn.Module, perturbation: Perturbation | Mapping[str, Perturbation]) -> Strategy:
    """An evolution strategy that trains the parameters of a model's layers without a backward pass.

        es = rulec.torch.perturb(model, Perturbation("lowrank", directions=256, sigma=0.02))
        batch = es.member_batch(images)
        loss = cross_entropy(es(batch), es.member_batch(labels), reduction="none")
        es.update(loss=loss)
        opt.step()

    Layers are Linear, Conv1d, Conv2d and Embedding. `es.left_alone` has the other parameters with the reasons, and a
    RuntimeWarning names layers without a perturbed parameter. The model stays as it is: `model(x)` is the plain
    network. A mapping such as `{"conv*": ..., "head": ...}` has perturbations by patterns of names of parameters or
    modules; the first pattern that matches holds. HyperError where nothing of the model, or of a pattern, can be
    perturbed.
    """
    if not isinstance(model, nn.Module):
        raise HyperError(f"a model to perturb is a torch.nn.Module, not {type(model).__name__}")
    strategy = Strategy(model, perturbation)
    warn_of_left_alone(strategy._census)
    strategy._warn_of_lost_noise(2)
    return strategy


class Strategy(StrategySteps):
    """The members of a model under a perturbation, step after step: see `perturb`.

    Errors are RulecError, raised before anything is written.
    """

    _calls = "es(batch) or es.evaluate before each update"

    def __init__(self, model: nn.Module, perturbation: Perturbation | Mapping[str, Perturbation]) -> None:
        self._set_up(model, Perturbations(perturbation), 0)

    def _set_up(self, model: nn.Module, perturbations: Perturbations, step: int) -> None:
        self._model, self._perturbations = model, perturbations
        self._census = PerturbedParameters(model, perturbations)
        self._estimators = SelfEstimators(self._census.perturbed)
        self._marked: list[Marked] = []
        self._begin(step)

    def _begin(self, step: int) -> None:
        """Begins a step with noise of its own; the memory of the step before is free."""
        super()._begin(step)
        self._noises = Noises(self._perturbations, self._census.perturbed, step)
        for module in self._estimators.modules:
            module.free_memory()

    def _names(self) -> list[str]:
        return [*self.parameters]

    def _warn_of_lost_noise(self, stacklevel: int) -> None:
        warn_of_lost_noise(self._perturbations, self._census.perturbed, stacklevel + 1)

    @property
    def model(self) -> nn.Module:
        """The model that is perturbed."""
        return self._model

    @property
    def replaced(self) -> tuple[str, ...]:
        """The names of the layers that members have for themselves."""
        return self._census.replaced

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The perturbed parameters by name, for an optimizer."""
        return {entry.name: entry.param for entry in self._census.perturbed}

    @property
    def left_alone(self) -> dict[str, str]:
        """The names of the parameters that are not perturbed, with the reason."""
        return dict(self._census.left_alone)

    # Forward

    @synchronized
    def member_batch(self, x: Tensor, shared: bool = True) -> Tensor:
        """The rows of `x` dealt to the members: all of them to each, or, where not `shared`, as many to each.

        Rows of the result are (repeats, directions), the first half of the repeats of positive sign where antithetic.
        A `shared` batch is `members` times as large as `x`, and a first layer computes the product of its samples once.
        Writing to the batch ends that; writing through `.data` or NumPy is not noticed, and gives wrong outputs.
        TensorError where `x` cannot be dealt out.
        """
        if not isinstance(x, Tensor) or x.dim() < 1:
            raise TensorError("a batch is a tensor whose first dimension is its samples")
        if not shared:
            population_of(x.shape[0], self._perturbations.population)
            return x
        rows = torch.from_numpy(tiled(x.shape[0], self._perturbations.population)).to(x.device)
        batch = x.index_select(0, rows)
        self._marked = [*(marked for marked in self._marked if marked.lives), Marked(batch)]
        return batch

    @synchronized
    def __call__(self, batch: Tensor, *args: Any, **keywords: Any) -> Any:
        """The model's outputs for a batch of all members, in one forward without a graph.

        `batch` has the rows of `member_batch`; further arguments are the model's. TensorError where rows cannot be
        dealt out, RulecError where something in the model mixes members or reads a perturbed parameter by itself.
        """
        self._census.check(self.model)
        self._check_batched()
        check_modules(self.model)
        if not isinstance(batch, Tensor) or batch.dim() < 1:
            raise TensorError("a batch is a tensor whose first dimension is its rows")
        who = population_of(batch.shape[0], self._perturbations.population)
        marked = next((marked for marked in self._marked if marked.is_batch(batch)), None)
        with ExitStack() as stack:
            stack.enter_context(self._counted(who.rows))
            stack.enter_context(torch.no_grad())
            stack.enter_context(uncompiled())
            stack.enter_context(self._estimators.forward(self._perturbations, self._step))
            stack.enter_context(Members(self._noises, who, marked))
            return self.model(batch, *args, **keywords)

    @contextmanager
    def _counted(self, rows: int) -> Iterator[None]:
        """Members are evaluated while it is entered, and have been where nothing was raised."""
        before = set(self._rows)
        self._rows.add(rows)
        try:
            yield
        except BaseException:
            self._rows = before
            raise

    def _check_batched(self) -> None:
        if any(perturbation.family == "spsa" for perturbation in self._perturbations):
            raise RulecError(
                "members of spsa are evaluated one by one: call es.evaluate(closure), or take the family 'independent'"
            )

    @synchronized
    def evaluate(self, closure: Callable[[], Any]) -> Tensor:
        """The fitness of every member, (members,) in float64, as `closure()` gives it, one member after the other.

        While it runs the model is that member. Its parameters are made for one operation at a time, rounded as a
        parameter is, and the model's own are never written.
        """
        self._census.check(self.model)
        if self._estimators.modules:
            kind = type(self._estimators.modules[0]).__name__
            raise RulecError(f"{kind} perturbs its weights by itself, for all members at once: call es(batch)")
        population = self._perturbations.population
        fitness = torch.empty(population.signs, population.directions, dtype=torch.float64)
        with self._counted(population.members):
            for direction in range(population.directions):
                for sign in range(population.signs):
                    with torch.no_grad(), uncompiled(), OneMember(self._noises, direction, -1 if sign else 1):
                        result = closure()
                    fitness[sign, direction] = _one_number(result)
        return fitness.flatten()

    @synchronized
    def check(self, x: Tensor, *args: Any, **keywords: Any) -> None:
        """RulecError where something in the model mixes members, as two forwards of `x`, a batch of them, show."""
        rows = set(self._rows)
        try:
            who = population_of(x.shape[0], self._perturbations.population)
            check_mixing(self.model, lambda batch: self(batch, *args, **keywords), x, who)
        finally:
            self._rows = rows

    # Updates

    def update(
        self, fitness: Any = None, loss: Any = None, shaping: Shaping = None, *, l1: float = 0.0, l2: float = 0.0
    ) -> Report:  # fmt: skip
        """Sets the gradient of every perturbed parameter to the estimate from the members' fitness; goes to a new step.

        `fitness`, to be maximised, has a number for each member, in the order (sign, direction), or for each row of the
        batch; `loss` is the same, to be minimised. Gradients are of the loss, or of minus the fitness, so that any
        optimizer descends. Without `shaping` they have the gradient of the smoothed loss as their mean; `shaping`
        ("centered_rank", "zscore", "ars_top" or a function of fitness) changes that.

        A direction whose fitness is not finite counts for nothing. Where too few are left nothing is estimated:
        gradients are None, and a RuntimeWarning says so.

        `l1` times the sign and `l2` times the value of the weights of binary layers are added to their gradients.
        """
        with self._lock:
            report = self._estimating(fitness, loss, shaping, (l1, l2)).update()
            self._begin(self._step + 1)
            return report

    def step(
        self, fitness: Any, opt: Any, loss: Any = None, shaping: Shaping = None, *, l1: float = 0.0, l2: float = 0.0
    ) -> Report:  # fmt: skip
        """`update` and `opt.step()`, without gradients where the optimizer's kernel can make the noise itself.

        It can for elementwise rules of rulec. The report says which parameters were updated so. Gradients of the others
        are freed.
        """
        with self._lock, lock_of(opt):
            report = self._estimating(fitness, loss, shaping, (l1, l2)).step(opt)
            self._begin(self._step + 1)
            return report

    def _estimating(self, fitness: Any, loss: Any, shaping: Shaping, penalty: tuple[float, float]) -> Estimating:
        self._census.check(self.model)
        values = self._by_member(_on_host(fitness), _on_host(loss))
        return Estimating(
            self._perturbations, self._census.perturbed, self._noises, self._estimators, values, shaping, penalty
        )

    # Memory and checkpoints

    def noise_bytes(self) -> int:
        """Bytes that are kept of this step's noise."""
        of_modules: int = sum(
            m.noise_bytes(self._estimators.draw(m, self._perturbations, self._step)) for m in self._estimators.modules
        )
        return self._noises.nbytes + of_modules

    @synchronized
    def free_memory(self) -> None:
        """Forgets what is kept of this step's noise; it is made again, the same, where it is needed."""
        self._noises.free()
        for module in self._estimators.modules:
            module.free_memory()

    @synchronized
    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model, "perturbations": self._perturbations, "step": self._step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["perturbations"].note_seeds()
        self._set_up(state["model"], state["perturbations"], state["step"])

    def __repr__(self) -> str:
        count = sum(entry.param.numel() for entry in self._census.perturbed)
        return f"Strategy({self._perturbations}, {count} parameters of {len(self.replaced)} layers, step {self._step})"


def _on_host(values: Any) -> Any:
    """A tensor as an array; everything else as it is."""
    if not isinstance(values, Tensor):
        return values
    values = resolved(values.detach().cpu())
    return values.numpy() if values.is_complex() else values.double().numpy()


def _one_number(fitness: Any) -> float:
    """The fitness of one member; TensorError where it is not one number."""
    values = numbers(_on_host(fitness))
    if values.size != 1:
        raise TensorError(f"the closure gave {list(values.shape)} numbers for a member: return one, such as their mean")
    return float(values.reshape(()))


#: Layers of one reason that are named.
_NAMED = 6


def warn_of_lost_noise(perturbations: Perturbations, perturbed: Iterable[Perturbed], stacklevel: int) -> None:
    """Warns where many weights round to themselves; `stacklevel` 1 is the caller. Logits of bits have no noise."""
    samples: dict[str, list[tuple[perturbation.Floats, str]]] = {}
    for entry in perturbed:
        if not (entry.is_self_estimated or entry.param.is_meta or is_fake(entry.param)):
            samples.setdefault(entry.pattern, []).append((_sample(entry.param), dtype_name(entry.param.dtype)))
    for pattern, some in samples.items():
        perturbation.warn_of_lost_noise(perturbations[pattern], some, stacklevel + 1)


def warn_of_left_alone(perturbed_parameters: PerturbedParameters) -> None:
    """Warns the caller's caller of trained layers without a perturbed parameter."""
    there = set(perturbed_parameters.replaced)
    reasons: dict[str, list[str]] = {}
    for name, reason in perturbed_parameters.left_alone.items():
        layer = name.rpartition(".")[0]
        if layer not in there and reason != FROZEN:
            layers = reasons.setdefault(reason, [])
            if layer not in layers:
                layers.append(layer)
    if reasons:
        each = "; ".join(f"{_some(layers)} ({reason})" for reason, layers in reasons.items())
        warnings.warn(
            f"layers with parameters that are left alone, and have no gradient: {each}", RuntimeWarning, stacklevel=3
        )


def _some(layers: list[str]) -> str:
    named = ", ".join(layer or "the model itself" for layer in layers[:_NAMED])
    return named if len(layers) <= _NAMED else f"{named} and {len(layers) - _NAMED} more"


def _sample(param: torch.Tensor) -> perturbation.Floats:
    """Elements of what is here of a parameter, in float64 on the host."""
    here = local_tensor(param).detach().reshape(-1)
    places = torch.from_numpy(perturbation.places(here.numel())).to(here.device)
    sample: perturbation.Floats = here[places].double().cpu().numpy()
    return sample
