"""The rules beside implementations that are not ours: who computes the same, and under which names.

Each `Peer` is one row: a rule of the library, the class or function that computes the same, and values far enough
from the defaults that a swapped name would show. `python -m tests.rules.peers` prints the manual's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np
import optax
import pytorch_optimizer
import torch
from numpy.typing import NDArray

import rulec

Array = NDArray[Any]
Hyper = Mapping[str, float]


class Run(Protocol):
    """One side of a comparison: it owns its parameters, and gradients move them."""

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update with the hyper-parameters of this step."""

    def params(self) -> list[Array]:
        """The parameters now."""


@dataclass(frozen=True)
class Peer:
    """One row of the table: a rule of ours, and who else computes it.

    `hyper` are the values compared, `decay` the transform of ours that stands for their `weight_decay`, `start` makes
    their side of the comparison, and `note` says for the manual what the two sides do differently.
    """

    rule: str
    theirs: str
    hyper: Hyper
    start: Callable[[Sequence[Array], Hyper], Run]
    decay: Literal["", "l2", "decay"] = ""
    note: str = ""

    @property
    def composed(self) -> str:
        """Our side in the words of the rule language: `l2 >> adam`."""
        return {"": self.rule, "l2": f"l2 >> {self.rule}", "decay": f"{self.rule} + decay"}[self.decay]

    def ours(self) -> rulec.Rule:
        """Our side as a rule."""
        rule = rulec.load(self.rule)
        if self.decay == "l2":
            return rulec.load("l2") >> rule
        return rule + rulec.load("decay") if self.decay == "decay" else rule

    def __str__(self) -> str:
        return f"{self.composed} = {self.theirs}"


@contextmanager
def float64_scalars() -> Iterator[None]:
    """torch as if its default dtype were float64.

    torch keeps what it counts per tensor (NAdam's mu_product, ASGD's eta and mu) in the default dtype, float32 as it
    is shipped. Under float64 its own code shows what it would compute without that rounding.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TorchRun:
    """A torch optimizer: `keywords` are its arguments for the hyper-parameters of ours."""

    def __init__(
        self, kind: Any, keywords: Callable[[Hyper], dict[str, Any]], params: Sequence[Array], hyper: Hyper,
        prepare: Callable[[torch.optim.Optimizer], None] | None = None, shipped: bool = False,
    ) -> None:  # fmt: skip
        self.tensors = [torch.tensor(p, requires_grad=True) for p in params]
        self.keywords = keywords
        self.prepare = prepare
        self.shipped = shipped
        self.optimizer = kind(self.tensors, foreach=False, **keywords(hyper))

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        self.optimizer.param_groups[0].update(self.keywords(hyper))
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad)
        if self.prepare is not None:
            self.prepare(self.optimizer)
            self.prepare = None
        if self.shipped:
            self.optimizer.step()
        else:
            with float64_scalars():
                self.optimizer.step()

    def params(self) -> list[Array]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


class OptaxRun:
    """An optax transformation: `make` gives it for the hyper-parameters of one step."""

    def __init__(
        self, make: Callable[[Hyper], Any], params: Sequence[Array], hyper: Hyper,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        with jax.enable_x64(True):
            self.make = make
            self.now = [jax.numpy.asarray(p) for p in params]
            self.state = make(hyper).init(self.now)
            if prepare is not None:
                self.state = prepare(self.state)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        with jax.enable_x64(True):
            given = [jax.numpy.asarray(g) for g in grads]
            updates, self.state = self.make(hyper).update(given, self.state, self.now)
            self.now = optax.apply_updates(self.now, updates)

    def params(self) -> list[Array]:
        return [np.asarray(p) for p in self.now]


def torch_peer(
    rule: str, kind: Any, keywords: Callable[[Hyper], dict[str, Any]], hyper: Hyper,
    decay: Literal["", "l2", "decay"] = "", note: str = "",
    prepare: Callable[[torch.optim.Optimizer], None] | None = None, shipped: bool = False,
) -> Peer:  # fmt: skip
    """A row whose other side is a class of torch.optim or pytorch_optimizer."""
    package = "torch.optim" if kind.__module__.startswith("torch.") else "pytorch_optimizer"

    def start(params: Sequence[Array], values: Hyper) -> Run:
        return TorchRun(kind, keywords, params, values, prepare, shipped)

    return Peer(rule, f"{package}.{kind.__name__}", hyper, start, decay, note)


def optax_peer(
    rule: str, theirs: str, make: Callable[[Hyper], Any], hyper: Hyper, decay: Literal["", "l2", "decay"] = "",
    note: str = "", prepare: Callable[[Any], Any] | None = None,
) -> Peer:  # fmt: skip
    """A row whose other side is an optax transformation."""

    def start(params: Sequence[Array], values: Hyper) -> Run:
        return OptaxRun(make, params, values, prepare)

    return Peer(rule, theirs, hyper, start, decay, note)


def _adam_like(h: Hyper) -> dict[str, Any]:
    """The keywords that Adam and most of its kin share."""
    return {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": h.get("weight_decay", 0)}


def _rmsprop(h: Hyper) -> dict[str, Any]:
    keys = ("lr", "alpha", "eps", "weight_decay")
    return {**{k: h[k] for k in keys}, "momentum": h.get("momentum", 0)}


def _same(*names: str, **fixed: Any) -> Callable[[Hyper], dict[str, Any]]:
    """Keywords of the same names, and fixed ones."""
    return lambda h: {**{name: h[name] for name in names}, **fixed}


def _float64_weights(optimizer: Any) -> None:
    """pytorch_optimizer's QHAdam keeps its running weights in float32: start them in float64."""
    optimizer.init_group(optimizer.param_groups[0])
    for state in optimizer.state.values():
        state["beta1_weight"] = state["beta1_weight"].double()
        state["beta2_weight"] = state["beta2_weight"].double()


def _yogi_from_zero(optimizer: Any) -> None:
    """pytorch_optimizer's Yogi starts the mean, too, at the initial accumulator: start it at zero."""
    optimizer.init_group(optimizer.param_groups[0])
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _optax_yogi_from_zero(state: Any) -> Any:
    """optax's Yogi starts the mean, too, at the initial accumulator: start it at zero."""
    return (state[0]._replace(mu=[jax.numpy.zeros_like(m) for m in state[0].mu]), *state[1:])


_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}
_RMSPROP = {"lr": 0.02, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.05}
_SGD = {"lr": 0.05, "weight_decay": 0.1}

_TORCH: tuple[Peer, ...] = (
    torch_peer("sgd", torch.optim.SGD, _same("lr", "weight_decay"), _SGD, "l2"),
    torch_peer(
        "momentum", torch.optim.SGD, _same("lr", "momentum", "dampening", "weight_decay"),
        {**_SGD, "momentum": 0.8, "dampening": 0.3}, "l2",
    ),
    torch_peer(
        "nesterov", torch.optim.SGD, _same("lr", "momentum", "weight_decay", nesterov=True),
        {**_SGD, "momentum": 0.8}, "l2",
    ),
    torch_peer(
        "adagrad", torch.optim.Adagrad,
        lambda h: {
            "lr": h["lr"], "eps": h["eps"], "lr_decay": h["lr_decay"], "weight_decay": h["weight_decay"],
            "initial_accumulator_value": h["initial"],
        },
        {"lr": 0.05, "eps": 1e-6, "lr_decay": 0.02, "initial": 0.1, "weight_decay": 0.05}, "l2",
    ),
    torch_peer(
        "adadelta", torch.optim.Adadelta, _same("lr", "rho", "eps", "weight_decay"),
        {"lr": 0.7, "rho": 0.85, "eps": 1e-5, "weight_decay": 0.05}, "l2",
    ),
    torch_peer("rmsprop", torch.optim.RMSprop, _rmsprop, _RMSPROP, "l2"),
    torch_peer("rmsprop_momentum", torch.optim.RMSprop, _rmsprop, {**_RMSPROP, "momentum": 0.8}, "l2"),
    torch_peer(
        "rmsprop_centered", torch.optim.RMSprop, lambda h: {**_rmsprop(h), "centered": True}, _RMSPROP, "l2",
        "torch gives NaN where rounding makes the variance negative; the rule holds it at zero",
    ),
    torch_peer(
        "rmsprop_centered_momentum", torch.optim.RMSprop, lambda h: {**_rmsprop(h), "centered": True},
        {**_RMSPROP, "momentum": 0.8}, "l2",
        "torch gives NaN where rounding makes the variance negative; the rule holds it at zero",
    ),
    torch_peer("adam", torch.optim.Adam, _adam_like, _ADAM_DECAY, "l2"),
    torch_peer(
        "adam", torch.optim.Adam, lambda h: {**_adam_like(h), "decoupled_weight_decay": True}, _ADAM_DECAY, "decay",
    ),
    torch_peer("adamw", torch.optim.AdamW, _adam_like, _ADAM_DECAY),
    torch_peer("amsgrad", torch.optim.Adam, lambda h: {**_adam_like(h), "amsgrad": True}, _ADAM_DECAY, "l2"),
    torch_peer("amsgrad", torch.optim.AdamW, lambda h: {**_adam_like(h), "amsgrad": True}, _ADAM_DECAY, "decay"),
    torch_peer("adamax", torch.optim.Adamax, _adam_like, _ADAM_DECAY, "l2"),
    torch_peer(
        "nadam", torch.optim.NAdam, lambda h: {**_adam_like(h), "momentum_decay": h["momentum_decay"]},
        {**_ADAM_DECAY, "momentum_decay": 0.02}, "l2", "torch keeps mu_product in float32",
    ),
    torch_peer("radam", torch.optim.RAdam, _adam_like, _ADAM_DECAY, "l2"),
    torch_peer(
        "radam", torch.optim.RAdam, lambda h: {**_adam_like(h), "decoupled_weight_decay": True}, _ADAM_DECAY, "decay",
    ),
    torch_peer(
        "rprop", torch.optim.Rprop,
        lambda h: {
            "lr": h["lr"], "etas": (h["eta_minus"], h["eta_plus"]), "step_sizes": (h["step_min"], h["step_max"]),
        },
        {"lr": 0.05, "eta_minus": 0.4, "eta_plus": 1.3, "step_min": 1e-3, "step_max": 0.09},
    ),
    torch_peer(
        "asgd", torch.optim.ASGD, _same("lr", "lambd", "alpha", "t0", "weight_decay"),
        {"lr": 0.05, "lambd": 0.01, "alpha": 0.6, "t0": 7, "weight_decay": 0.05}, "l2",
        "torch keeps eta and mu in float32",
    ),
)  # fmt: skip

_PYTORCH_OPTIMIZER: tuple[Peer, ...] = (
    torch_peer(
        "lion", pytorch_optimizer.Lion,
        lambda h: {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "weight_decay": h["weight_decay"]},
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
    ),
    torch_peer(
        "signum", pytorch_optimizer.SignSGD, _same("lr", "momentum", "weight_decay"),
        {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.3}, "decay",
    ),
    torch_peer("adabelief", pytorch_optimizer.AdaBelief, _adam_like, _ADAM_DECAY, "decay"),
    torch_peer(
        "yogi", pytorch_optimizer.Yogi, lambda h: {**_adam_like(h), "initial_accumulator": h["initial"]},
        {**_ADAM_DECAY, "initial": 0.01}, "decay", "pytorch_optimizer and optax start the mean at 1e-6 instead of 0",
        _yogi_from_zero,
    ),
    torch_peer(
        "adan", pytorch_optimizer.Adan,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"],
            "weight_decay": h["weight_decay"],
        },
        {"lr": 0.03, "beta1": 0.9, "beta2": 0.8, "beta3": 0.95, "eps": 1e-6, "weight_decay": 0.07},
    ),
    torch_peer(
        "ademamix", pytorch_optimizer.AdEMAMix,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"], "alpha": h["alpha"],
            "weight_decay": h["weight_decay"], "weight_decouple": True, "t_alpha_beta3": h["alpha_warmup"],
        },
        {**_ADAM_DECAY, "beta3": 0.99, "alpha": 3, "alpha_warmup": 15, "beta3_warmup": 15},
    ),
    torch_peer(
        "qhadam", pytorch_optimizer.QHAdam, lambda h: {**_adam_like(h), "nus": (h["nu1"], h["nu2"])},
        {**_ADAM_DECAY, "nu1": 0.6, "nu2": 0.9}, "l2", "pytorch_optimizer keeps its weights in float32",
        _float64_weights,
    ),
    torch_peer(
        "madgrad", pytorch_optimizer.MADGRAD,
        lambda h: {
            "lr": h["lr"] - h["eps"], "momentum": h["momentum"], "eps": h["eps"], "weight_decay": h["weight_decay"],
        },
        {"lr": 0.03, "momentum": 0.8, "eps": 1e-6, "weight_decay": 0.05}, "l2",
        "pytorch_optimizer adds eps to lr, as the authors' code does and the paper does not: it is given lr - eps",
    ),
)  # fmt: skip


def _laprop(h: Hyper) -> Any:
    """LaProp of optax's parts: its own class would sum lr times the momentum, as the paper does not."""
    return optax.chain(
        optax.scale_by_rms(h["beta2"], h["eps"], eps_in_sqrt=False, bias_correction=True),
        optax.ema(h["beta1"]),
        optax.add_decayed_weights(h["weight_decay"]),
        optax.scale_by_learning_rate(h["lr"]),
    )


def _optax_adam_like(function: Callable[..., Any]) -> Callable[[Hyper], Any]:
    return lambda h: function(
        h["lr"], b1=h["beta1"], b2=h["beta2"],
        **{key: h[key] for key in ("eps", "weight_decay") if key in h},
    )  # fmt: skip


def _optax_rmsprop(centered: bool) -> Callable[[Hyper], Any]:
    return lambda h: optax.rmsprop(h["lr"], h["alpha"], h["eps"], eps_in_sqrt=False, centered=centered)


_RMSPROP_ALONE = {"lr": 0.02, "alpha": 0.9, "eps": 1e-6}

_OPTAX: tuple[Peer, ...] = (
    optax_peer("sgd", "optax.sgd", lambda h: optax.sgd(h["lr"]), {"lr": 0.05}),
    optax_peer("momentum", "optax.sgd", lambda h: optax.sgd(h["lr"], h["momentum"]), {"lr": 0.05, "momentum": 0.8}),
    optax_peer(
        "nesterov", "optax.sgd", lambda h: optax.sgd(h["lr"], h["momentum"], nesterov=True),
        {"lr": 0.05, "momentum": 0.8},
    ),
    optax_peer(
        "adadelta", "optax.adadelta", lambda h: optax.adadelta(h["lr"], h["rho"], h["eps"], h["weight_decay"]),
        {"lr": 0.7, "rho": 0.85, "eps": 1e-5, "weight_decay": 0.05}, "l2",
    ),
    optax_peer("rmsprop", "optax.rmsprop", _optax_rmsprop(centered=False), _RMSPROP_ALONE),
    optax_peer("rmsprop_centered", "optax.rmsprop", _optax_rmsprop(centered=True), _RMSPROP_ALONE),
    optax_peer("adam", "optax.adam", _optax_adam_like(optax.adam), _ADAM),
    optax_peer("adamw", "optax.adamw", _optax_adam_like(optax.adamw), _ADAM_DECAY),
    optax_peer("adamax", "optax.adamax", _optax_adam_like(optax.adamax), _ADAM),
    optax_peer(
        "lion", "optax.lion", _optax_adam_like(optax.lion),
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
    ),
    optax_peer("signum", "optax.signum", lambda h: optax.signum(h["lr"], h["momentum"]), {"lr": 0.01, "momentum": 0.8}),
    optax_peer(
        "adabelief", "optax.adabelief",
        lambda h: optax.adabelief(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"], eps_root=h["eps"]), _ADAM,
    ),
    optax_peer(
        "yogi", "optax.yogi", _optax_adam_like(optax.yogi), _ADAM,
        note="pytorch_optimizer and optax start the mean at 1e-6 instead of 0", prepare=_optax_yogi_from_zero,
    ),
    optax_peer(
        "ademamix", "optax.contrib.ademamix",
        lambda h: optax.contrib.ademamix(
            h["lr"], h["beta1"], h["beta2"], h["beta3"], h["alpha"], h["eps"], weight_decay=h["weight_decay"],
        ),
        {**_ADAM_DECAY, "beta3": 0.99, "alpha": 3},
    ),
    optax_peer(
        "laprop", "optax.chain(scale_by_rms, ema)", _laprop,
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.07}, "decay",
        "the authors' code, and pytorch_optimizer, sum lr times the momentum, which differs where lr changes",
    ),
    optax_peer("adopt", "optax.contrib.adopt", _optax_adam_like(optax.contrib.adopt), {**_ADAM, "eps": 1e-3}),
)  # fmt: skip

PEERS: tuple[Peer, ...] = (*_TORCH, *_PYTORCH_OPTIMIZER, *_OPTAX)
