"""The statistics that rules of the library declare: all compile and are finite, and some values by other formulas."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import rulec
from rulec import Rule
from rulec.checkpoint.content import meaning
from rulec.compiler.pipeline import compile
from rulec.compiler.text import program_text
from rulec.language.library.load import parse
from rulec.language.statistics import watched
from rulec.tools.compare.difference import Trial, shapes_for
from rulec.tools.compare.sides import EngineSide
from tests.library import by_kind

Array = np.ndarray[Any, Any]

RULES = Path(rulec.__file__).parent.parent / "rules"

#: The rules whose own file has the key.
DECLARING = [name for name in rulec.rules() if "\nstatistics:" in (RULES / f"{name}.yaml").read_text()]


def whole_of(rule: Rule) -> Rule:
    """A rule that steps: a wrapper goes around Adam, and around gradient descent where it wraps two."""
    return (rule(*map(rulec.load, ("adam", "sgd")[: len(rule.wraps)])) if rule.wraps else rule).standalone()


def own_names(name: str) -> list[str]:
    return [*yaml.safe_load((RULES / f"{name}.yaml").read_text())["statistics"]]


def stepped(rule: Rule, trial: Trial, hyper: Mapping[str, float] | None = None) -> dict[str, float]:
    """All statistics that a rule declares, of the last step of a trial by the numpy backend."""
    known = {k: v for k, v in (hyper or {}).items() if k in rule.standalone().hyper}
    side = EngineSide(rule, trial.params, known, "numpy", [*rule.statistics])
    for grads, inputs in zip(trial.gradients(), trial.inputs(rule), strict=True):
        side.step(grads, inputs)
    return side.statistics().numbers()


def test_at_least_25_rules_declare_statistics() -> None:
    assert len(DECLARING) >= 25


@pytest.mark.parametrize("name", by_kind(DECLARING))
def test_the_statistics_of_a_rule_compile_and_take_no_stage_more(name: str) -> None:
    rule = whole_of(rulec.load(name))
    names = [*rule.statistics]
    assert {key.rpartition(".")[2] for key in names} >= {*own_names(name)}
    measuring = compile(rule, watch=watched(rule, names))
    assert len(measuring.statistics) == len(names)
    assert len(measuring.stages) == len(compile(rule).stages)


def without_statistics(name: str) -> Rule:
    """A rule of the library from its file without the key."""
    path = RULES / f"{name}.yaml"
    text = re.sub(r"^statistics:.*\n(?: .*\n)*", "", path.read_text(), flags=re.MULTILINE)
    return parse(text, path.stem, path.parent)


@pytest.mark.parametrize("name", by_kind(DECLARING))
def test_a_rule_means_the_same_without_its_statistics(name: str) -> None:
    rule, plain = whole_of(rulec.load(name)), whole_of(without_statistics(name))
    assert {*rule.statistics} == {*plain.statistics, *own_names(name)} != {*plain.statistics}
    assert meaning(rule) == meaning(plain)
    assert program_text(compile(rule)) == program_text(compile(plain))


@pytest.mark.parametrize("name", by_kind(DECLARING))
def test_the_statistics_of_a_rule_are_finite_numbers(name: str) -> None:
    rule = whole_of(rulec.load(name))
    trial = Trial("float32", 3, shapes_for(rule))
    numbers = stepped(rule, trial)
    assert {key.partition("/")[0] for key in numbers} == {*rule.statistics}
    assert all(map(np.isfinite, numbers.values())), numbers


#: Rules that only call or compose those above, and the statistics that they have by this.
COMPOSED = {
    "lamb": ["trust_ratio.trust"],
    "fromage": ["trust_ratio.trust"],
    "cautious_lion": ["cautious.kept"],
    "cautious_lamb": ["cautious_adamw.cautious.kept", "trust_ratio.trust"],
    "emonavi": ["emo_drive.drive"],
    "adoptw": ["adopt.clipped"],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_rules_have_the_statistics_of_their_parts(name: str) -> None:
    rule = rulec.load(name)
    assert [*rule.statistics] == COMPOSED[name]
    assert all(map(np.isfinite, stepped(rule, Trial("float32", 2)).values()))


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        (["clip_by_global_norm", "adamw"], ["clip_by_global_norm.clip"]),
        (["cautious_decay", "lamb"], ["cautious_decay.decayed", "lamb.trust_ratio.trust"]),
        (["clip_by_value", "prodigy"], ["clip_by_value.clipped", "prodigy.d"]),
    ],
)
def test_chains_have_them_under_dotted_names(parts: list[str], names: list[str]) -> None:
    first, second = map(rulec.load, parts)
    assert [*(first >> second).statistics] == names


def test_a_wrapper_has_its_own_and_those_of_the_rule_inside() -> None:
    assert [*rulec.load("lookahead")(rulec.load("lamb")).statistics] == ["distance", "lamb.trust_ratio.trust"]


#: One matrix and one vector, both alike to all rules below.
TRIAL = Trial("float64", 4)


def by_tensor(numbers: Mapping[str, float], name: str) -> list[float]:
    return [numbers[f"{name}/tensor {i}"] for i in range(len(TRIAL.shapes))]


def last(trial: Trial) -> list[Array]:
    return [*trial.gradients()][-1]


def adam_directions(trial: Trial) -> list[Array]:
    """Adam's directions at the last step of a trial, by its formula and its defaults."""
    moments = [(np.zeros(s), np.zeros(s)) for s in trial.shapes]
    for grads in trial.gradients():
        moments = [(0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g) for (m, v), g in zip(moments, grads, strict=True)]
    t = trial.steps
    return [m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) for m, v in moments]


def test_the_clip_of_a_global_norm_is_its_factor() -> None:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("sgd")
    numbers = stepped(rule, TRIAL, {"lr": 0.1, "max_norm": 0.5})
    norm = np.sqrt(sum((g * g).sum() for g in last(TRIAL)))
    assert numbers == {"clip_by_global_norm.clip/group 0": pytest.approx(0.5 / (norm + 1e-6), rel=1e-12)}


def test_the_kept_share_of_a_cautious_step_is_of_its_elements() -> None:
    numbers = stepped(rulec.load("cautious_adamw"), TRIAL)
    directions = adam_directions(TRIAL)
    wanted = [np.mean(d * g > 0) for d, g in zip(directions, last(TRIAL), strict=True)]
    assert by_tensor(numbers, "cautious.kept") == wanted
    assert any(0 < share < 1 for share in wanted)


def test_the_trust_of_lamb_is_a_norm_over_a_norm() -> None:
    once = Trial("float64", 1)
    numbers = stepped(rulec.load("lamb"), once, {"weight_decay": 0.1})
    for p, g, trust in zip(once.params, last(once), by_tensor(numbers, "trust_ratio.trust"), strict=True):
        direction = g / (np.abs(g) + 1e-6) + 0.1 * p
        assert trust == pytest.approx(np.linalg.norm(p) / np.linalg.norm(direction), rel=1e-12)


def test_the_distance_of_dog_is_from_the_first_parameters() -> None:
    side = EngineSide(rulec.load("dog"), TRIAL.params, {"lr": 5.0}, "numpy", "distance")
    largest, before = 0.0, TRIAL.params
    for t, grads in enumerate(TRIAL.gradients(), 1):
        apart = np.sqrt(sum(((p - q) ** 2).sum() for p, q in zip(before, TRIAL.params, strict=True)))
        start = 1e-6 * (1 + np.sqrt(sum((p * p).sum() for p in TRIAL.params)))
        largest = start if t == 1 else max(largest, apart)
        side.step(grads)
        assert side.statistics().numbers() == {"distance": pytest.approx(largest, rel=1e-9)}
        before = [each["p"].copy() for each in side.values()]
    assert largest > start


def test_the_weight_of_a_schedule_free_step_is_one_over_t() -> None:
    numbers = stepped(rulec.load("schedule_free_sgd"), TRIAL)
    assert [*numbers.values()] == pytest.approx([1 / TRIAL.steps] * len(numbers), rel=1e-12)


def test_the_distance_of_lookahead_is_that_of_the_slow_weights() -> None:
    rule = rulec.load("lookahead")(rulec.load("sgd"))
    numbers = stepped(rule, TRIAL, {"lr": 0.1, "k": 5})
    moved = [0.1 * sum(grads[i] for grads in TRIAL.gradients()) for i in range(2)]
    assert by_tensor(numbers, "distance") == pytest.approx([np.linalg.norm(x) for x in moved], rel=1e-9)
    assert by_tensor(stepped(rule, TRIAL, {"lr": 0.1, "k": 4}), "distance") == [0, 0]


def test_the_clipped_share_of_sophia_is_of_its_elements() -> None:
    once = Trial("float64", 1)
    rule = rulec.load("sophia")
    numbers = stepped(rule, once, {"gamma": 5.0})
    (inputs,) = once.inputs(rule)
    for i, (g, h) in enumerate(zip(last(once), inputs["hessian"], strict=True)):
        clipped = np.abs(0.035 * g) >= np.maximum(5.0 * 0.01 * h, 1e-12)
        assert numbers[f"clipped/tensor {i}"] == pytest.approx(np.mean(clipped), rel=1e-12)
        assert 0 < np.mean(clipped) < 1


def moment(trial: Trial, beta: float, of: Callable[[Array], Array] = lambda g: g) -> list[Array]:
    """The running mean of a function of the gradients, from zero, after the steps of a trial."""
    means = [np.zeros(shape) for shape in trial.shapes]
    for grads in trial.gradients():
        means = [beta * m + (1 - beta) * of(g) for m, g in zip(means, grads, strict=True)]
    return means


def deviations(trial: Trial) -> list[float]:
    """How far each last gradient is from the running mean, in units of the gradient."""
    apart = zip(last(trial), moment(trial, 0.9), strict=True)
    return [float(np.linalg.norm(g - m) / np.linalg.norm(g)) for g, m in apart]


def damped(trial: Trial) -> list[float]:
    """The mean factor of a gradient in TAM: of its smoothed agreement with the momentum, column by column."""
    shares, momenta = [np.zeros(s) for s in trial.shapes], [np.zeros(s) for s in trial.shapes]
    for t, grads in enumerate(trial.gradients()):
        for i, g in enumerate(grads):
            m = g if t == 0 else momenta[i]
            shares[i] = 0.9 * shares[i] + 0.1 * m * g / (np.linalg.norm(m, axis=0) * np.linalg.norm(g, axis=0))
            momenta[i] = 0.9 * m + ((1 + shares[i]) / 2 + 1e-8) * g
    return [float(np.mean((1 + s) / 2)) for s in shares]


def trusted(trial: Trial) -> list[float]:
    """The mean factor of M-SVAG: the square of the mean over that and its variance."""
    m, v, t = moment(trial, 0.9), moment(trial, 0.9, np.square), trial.steps
    rho = (1 - 0.9 ** (2 * t)) / (1 - 0.81) * 0.01 / (1 - 0.9**t) ** 2
    squares = [(a / (1 - 0.9**t)) ** 2 for a in m]
    totals = [a + rho * (b / (1 - 0.9**t) - a) / (1 - rho) for a, b in zip(squares, v, strict=True)]
    return [float(np.mean(np.clip(a / b, 0, 1))) for a, b in zip(squares, totals, strict=True)]


def friction(trial: Trial) -> list[float]:
    """The mean friction of diffGrad: a sigmoid of the change of the gradient."""
    before, now = [*trial.gradients()][-2:]
    return [float(np.mean(1 / (1 + np.exp(-np.abs(a - b))))) for a, b in zip(before, now, strict=True)]


def fisher_clips(trial: Trial) -> list[float]:
    """The factor of FAdam's natural gradient, whose root mean square is at most 1."""
    f = [x / (1 - 0.999**trial.steps) for x in moment(trial, 0.999, np.square)]
    eps = [min(1e-8, 0.01 * np.sqrt(np.mean(g * g))) for g in last(trial)]
    u = [g / (np.sqrt(a) + e) for g, a, e in zip(last(trial), f, eps, strict=True)]
    return [1 / max(1.0, float(np.sqrt(np.mean(x * x)))) for x in u]


def corrected_clips(trial: Trial) -> list[float]:
    """The factor of the corrected gradient of MARS, whose norm is at most 1."""
    before, now = [*trial.gradients()][-2:]
    norms = [np.linalg.norm(g + 0.025 * 0.95 / 0.05 * (g - b)) for b, g in zip(before, now, strict=True)]
    return [1 / max(1.0, float(n)) for n in norms]


def accumulated_rate(trial: Trial) -> list[float]:
    """The step size of AdaGrad-Norm, one for all tensors."""
    return [1 / float(np.sqrt(0.01 + sum((g * g).sum() for grads in trial.gradients() for g in grads)))]


def below_cutoff(trial: Trial) -> list[float]:
    return [float(np.mean(np.abs(p) < 0.5)) for p in trial.params]


@pytest.mark.parametrize(
    ("name", "statistic", "wanted"),
    [
        ("adabelief", "deviation", deviations),
        ("radabelief", "deviation", deviations),
        ("tam", "scale", damped),
        ("msvag", "scale", trusted),
        ("diffgrad", "scale", friction),
        ("fadam", "clip", fisher_clips),
        ("mars_lion", "clip", corrected_clips),
        ("adagrad_norm", "rate", accumulated_rate),
        ("sara", "kept", below_cutoff),
    ],
)
def test_statistics_are_those_of_a_formula_in_numpy(
    name: str, statistic: str, wanted: Callable[[Trial], list[float]]
) -> None:
    numbers = stepped(rulec.load(name), TRIAL, {"cutoff": 0.5})
    values = [value for key, value in numbers.items() if key.partition("/")[0] == statistic]
    assert values == pytest.approx(wanted(TRIAL), rel=1e-10)


@pytest.mark.parametrize(("steps", "rect"), [(5, False), (8, True)])
def test_the_rect_of_radabelief_is_that_of_radam(steps: int, rect: bool) -> None:
    trial = Trial("float64", steps)
    ours, radams = (stepped(rulec.load(name), trial) for name in ("radabelief", "radam"))
    assert by_tensor(ours, "rect") == by_tensor(radams, "rect")
    assert (min(by_tensor(ours, "rect")) > 0) == rect


def test_the_scale_of_amos_shrinks_as_its_decay_grows() -> None:
    numbers = stepped(rulec.load("amos"), TRIAL, {"lr": 0.1})
    for i, shape in enumerate(TRIAL.shapes):
        eta, v, b, scale = (0.5 if len(shape) < 2 else np.sqrt(2 / shape[1])), 0.0, 0.0, 1.0
        for t, grads in enumerate(TRIAL.gradients(), 1):
            g2 = float(np.mean(grads[i] ** 2))
            v = 0.999 * v + 0.001 * g2
            gamma = 0.01 * (1 - 0.999**t) / v * g2 / np.sqrt(1 + np.sqrt(0.1) * b / 4)
            scale = 1 / (1 + np.sqrt(0.1 * eta) * b / 4)
            b += gamma * (1 + b)
        assert numbers[f"scale/tensor {i}"] == pytest.approx(scale, rel=1e-10)
        assert scale < 1


def test_the_clip_and_the_instability_of_came_are_those_of_its_first_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from pytorch_optimizer import CAME

    seen: list[float] = []
    measure = CAME.get_rms

    def measured(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(measure(x)))
        return measure(x)

    monkeypatch.setattr(CAME, "get_rms", staticmethod(measured))
    numbers = stepped(rulec.load("came"), TRIAL, {"d": 0.5})
    for i, p in enumerate(TRIAL.params):
        tensor = torch.tensor(p, requires_grad=True)
        theirs = CAME([tensor], lr=2e-4, betas=(0.9, 0.999, 0.9999), clip_threshold=0.5, foreach=False)
        m = np.zeros_like(p)
        for grads in TRIAL.gradients():
            tensor.grad = torch.tensor(grads[i])
            before, seen[:] = m, []
            theirs.step()
            m = theirs.state[tensor]["exp_avg"].numpy().copy()
        # It measures the parameter, then the update before it is clipped.
        assert numbers[f"clip/tensor {i}"] == pytest.approx(min(1.0, 0.5 / seen[1]), rel=1e-10)
        update = (m - 0.9 * before) / 0.1
        assert numbers[f"instability/tensor {i}"] == pytest.approx(float(np.sqrt(np.mean((update - m) ** 2))), rel=1e-9)


@pytest.mark.parametrize("along", [0.0, 1.0])
def test_what_adamp_removes_is_what_the_projection_of_its_peer_removes(along: float) -> None:
    import torch
    from pytorch_optimizer.optimizer.adamp import projection

    (p, vector), rng = TRIAL.params, np.random.default_rng(0)
    g = rng.normal(size=p.shape)
    g += (along - (g * p).sum(axis=1, keepdims=True) / (p * p).sum(axis=1, keepdims=True)) * p
    side = EngineSide(rulec.load("adamp"), [p, vector], {}, "numpy", "removed")
    side.step([g, np.ones_like(vector)])
    direction = g / (np.abs(g) + 1e-8)
    weights, grad, step = (torch.tensor(x) for x in (p, g, direction.copy()))
    projected, _ = projection(weights, grad, step, delta=0.1, wd_ratio=0.1, eps=1e-8)
    removed = np.linalg.norm(direction - projected.numpy()) / np.linalg.norm(direction)
    assert by_tensor(side.statistics().numbers(), "removed") == [pytest.approx(removed, rel=1e-6, abs=1e-12), 0]
    assert (removed > 0) == (along == 0)


def test_the_scale_of_polargrad_is_near_the_nuclear_norm_of_its_momentum() -> None:
    trial = Trial("float32", 3, ((6, 4),))
    (m,) = moment(trial, 0.95)
    ratio = stepped(rulec.load("polargrad"), trial)["scale/tensor 0"] / np.linalg.norm(m, "nuc")
    assert 0.6 < ratio < 1.3
