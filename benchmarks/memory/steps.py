"""The memory of a training step in torch: for three models, with gradients kept until the step or used at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.result import Row
from rulec.memory.live import Account
from rulec.memory.shape import LLAMA, SMALL, Shape
from rulec.tools.compare.measure import interleaved

if TYPE_CHECKING:
    from rulec.torch.memory_profile.meter import Training, Way

#: Rule -> its hyper-parameters here.
RULES: Mapping[str, Mapping[str, Any]] = {"sgd": {}, "lion": {}, "adamw": {}, "apollo": {}}
WAYS: tuple[Way, ...] = ("deferred", "eager", "epilogue")

#: The bars: what may be alive at once beside weights, state and activations, in largest gradients; what Apollo may
#: take of the 7.5B shape without activations, in weights; and the time of an eager step over that of a deferred one.
GRADIENTS, APOLLO, SLOWER = 1.05, 1.35, 1.05

WEIGHTS = "most at once without activations, times the weights"
BESIDE = "of that beside weights and state, in largest gradients"
TIME = "a training step on the CPU, times as long as deferred"

#: Layers and width of the linear model, rows of its inputs, and rounds of the timing.
LAYERS, WIDTH, BATCH, ROUNDS = 24, 1024, 256, 15


@dataclass(frozen=True)
class Model:
    """A model: its name, its inputs, Apollo's rank, and the dtype of weights and state."""

    name: str
    make: Callable[..., Any]
    batch: Callable[[str], tuple[Any, ...]]
    rank: int
    dtype: str = "float32"


def missing() -> str | None:
    """A note about torch where it is not installed; None where it is."""
    return None if importlib.util.find_spec("torch") else "rulec.torch is left out: torch is not installed"


def models(quick: bool) -> list[Model]:
    """The three models; quick ones have a few layers."""
    from rulec.torch.memory_profile.meter import rows, tokens
    from rulec.torch.memory_profile.models import Linears, Transformer

    layers, width = (4, 64) if quick else (LAYERS, WIDTH)
    llama = replace(LLAMA, layers=2, width=128, inner=256, vocabulary=512, heads=4, groups=4, head=32)
    billions: Shape = llama if quick else LLAMA
    length = 16 if quick else 2048
    return [
        Model(f"{layers} linear layers of {width}", partial(Linears, layers, width), rows(BATCH, width), width // 16),
        Model("a transformer with tied embeddings", partial(Transformer, SMALL), tokens(2, 64), SMALL.width // 16),
        Model(
            "Llama of 7.5B", partial(Transformer, billions, True), tokens(1, length), billions.width // 16, "bfloat16"
        ),
    ]


def chosen_rules(only: Sequence[str]) -> list[str]:
    """The measured rules, restricted to `only`."""
    return [rule for rule in RULES if not only or rule in only]


def parts(only: Sequence[str] = ()) -> int:
    """The number of calls of `advance` in `measure`."""
    return 0 if missing() else 4 * len(chosen_rules(only))


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object], notes: list[str]) -> list[Row]:
    """The rows of all models, rules and ways, and of the time of a step."""
    reason = missing()
    if reason is not None:
        notes.append(reason)
        return []
    rows: list[Row] = []
    every = models(quick)
    for model in every:
        for rule in chosen_rules(only):
            rows += _rows(model, rule)
            advance()
    for rule in chosen_rules(only):
        rows += times(every[0], rule, 2 if quick else ROUNDS)
        advance()
    notes += NOTES if rows else []
    return rows


NOTES = [
    "activations are all that a model makes in its forward and backward pass but for gradients of weights; Llama has "
    "one sequence of 2048 tokens, its layers are computed again in the backward pass, and all is in bfloat16",
    "all models but the timed ones are of fake tensors, which take no memory: what lies between the kernels of Apollo "
    "is counted as torch's operations on a device",
    "Apollo's rank is a sixteenth of the width, of Llama 256; a gradient that is a sum, of a tied embedding, counts "
    "with its parts, which autograd keeps until it is made",
]


def training(model: Model, rule: str) -> Training:
    """A model's training with a rule."""
    from rulec.torch.memory_profile.meter import Training

    hyper = {"rank": model.rank} if rule == "apollo" else {}
    return Training(model.make, model.batch, rule, {**RULES[rule], **hyper}, model.dtype)


def _rows(model: Model, rule: str) -> Iterator[Row]:
    from rulec.torch.memory_profile.meter import account

    chosen = training(model, rule)
    accounts: dict[Way, Account] = {way: account(chosen, way) for way in WAYS}
    deferred = accounts["deferred"]
    for way, one in accounts.items():
        subject, detail = f"{model.name}, {rule}, {way}", one.data()
        judged = rule == "apollo" and way == "eager" and model.name.startswith("Llama")
        weights = one.beside["weights"]
        yield Row(
            subject, WEIGHTS, one.without_activations / weights, APOLLO if judged else None, "at most", "", detail
        )
        if way != "deferred":
            beyond = one.without_activations - weights - one.most["state"]
            yield Row(subject, BESIDE, beyond / deferred.gradient, GRADIENTS, "at most")


def times(model: Model, rule: str, rounds: int) -> Iterator[Row]:
    """The time of an eager step on real tensors, by turns with the deferred one."""
    from rulec.torch.memory_profile.meter import stepping
    from rulec.torch.tensors.tensors import DTYPES

    chosen = training(model, rule)
    contenders: dict[str, Callable[[], object]] = {}
    for way in WAYS:
        module = model.make(dtype=DTYPES[model.dtype], device="cpu")
        contenders[way] = stepping(module, chosen, way)[1]
    taken = interleaved(contenders, rounds)
    for way in WAYS[1:]:
        detail = {**taken.medians(), "scatter": taken.quartiles(way, "deferred")}
        ratio = taken.ratio(way, "deferred")
        yield Row(f"{model.name}, {rule}, {way}", TIME, ratio, SLOWER, "at most", "", detail)
