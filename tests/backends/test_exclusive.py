"""A master copy beside a parameter that steps alone write: no step reads the parameter, and the bits are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array.arrays import NumpyArrays
from rulec.compiler.ir import Memory, Program
from rulec.compiler.layout import layout_for, reads_parameter, scheduled, traffic
from rulec.compiler.pipeline import compile
from rulec.compiler.weights import DTYPES
from rulec.language.statistics import watched
from rulec.runtime.engine import Engine, default_hyper
from rulec.runtime.storage.options import Storage
from rulec.testing import conformance
from rulec.testing.cases import loaded
from rulec.testing.trial import Trial
from rulec_backends.cupy import CupyBackend
from tests.backends.here import BACKENDS, BRAIN, needs_compiler
from tests.backends.triton_process import check_in_interpreter
from tests.library import by_kind, single
from tests.pairs import paired

Array = np.ndarray[Any, Any]

EXCLUSIVE = Memory("master", exclusive=True)
RULES = ["adamw", "lion", "adafactor", "lamb", "muon"]

#: Keeps the weight before the step, and takes the gradient for the new one.
KEEP = rulec.parse(
    "name: Keep\nsummary: Takes the gradient for p.\nstate: {m: 0}\nstep: |\n  m = where(t > 0, p, m)\n  p = g\n"
)

#: The least numbers that are infinite in a dtype: the middle of its largest number and the next power of two.
LEAST = {"bfloat16": np.float32((2 - 2.0**-8) * 2.0**127), "float16": np.float32(65520)}
NUMPY = {"bfloat16": BRAIN, "float16": np.dtype(np.float16)}

WATCH = {"length": "norm(p)", "moved": "norm(update)", "kept": "norm(p.stored)", "widest": "max(abs(p))"}


def edges(dtype: str) -> Array:
    """Numbers around the first infinite one, special ones, and some far below the dtype's smallest."""
    least = LEAST[dtype]
    around = [np.nextafter(least, np.float32(0)), least, np.nextafter(least, np.float32(np.inf)), least * 0.998]
    values = [*around, np.inf, np.nan, 0.0, 1e-8, 1e-40, *([65504, 1e6, 1e38] if dtype == "float16" else [])]
    return np.array([sign * value for value in values for sign in (1, -1)], np.float32)


def trained(
    rule: str,
    backend: str,
    dtype: str,
    exclusive: bool,
    watch: Any = None,
    master: Array | None = None,
    steps: int = 12,
) -> tuple[list[dict[str, Array]], Program]:
    """The parameter, states and statistics after each step, and the program; `master` are some first weights."""
    known, draws = rulec.load(rule), np.random.default_rng(0)
    param = draws.standard_normal((24, 40)).astype(NUMPY[dtype])
    engine = Engine(known, NumpyArrays(), backend, weights="master", watch=watch, exclusive=exclusive)
    number = engine.add(param, 0, "w")
    hyper = engine.hyper_table([default_hyper(known, {"lr": 1e-4}, dtype)])
    engine.prepare((number,), None, hyper)
    copy = engine.state(number)["param::master"]
    if master is not None:
        copy.reshape(-1)[: master.size] = master
    with np.errstate(over="ignore", invalid="ignore"):
        param[...] = copy.astype(param.dtype)
    seen = []
    for step in range(steps):
        engine.statistics.begin(watch is not None)
        engine.step((number,), [draws.standard_normal((24, 40)).astype(param.dtype)], hyper)
        numbers = engine.statistics.of_step(step, ["w"], np.asarray, engine.host.numbers).numbers()
        arrays = {**engine.state(number), "p": param, **numbers}
        seen.append({name: np.array(each) for name, each in arrays.items()})
    (bucket,) = engine.buckets.values()
    return seen, bucket.program


def same_bits(ours: Array, theirs: Array) -> bool:
    """Whether two arrays have the same bits; any NaN is as good as another."""
    nan = np.isnan(ours.astype(np.float64))
    if not np.array_equal(nan, np.isnan(theirs.astype(np.float64))):
        return False
    return ours.dtype == theirs.dtype and ours[~nan].tobytes() == theirs[~nan].tobytes()


def check_same(ours: list[dict[str, Array]], theirs: list[dict[str, Array]]) -> None:
    """AssertionError with the name of an array that differs in a step."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        assert mine.keys() == other.keys()
        differing = [name for name in mine if not same_bits(mine[name], other[name])]
        assert not differing, (step, differing)


@pytest.mark.parametrize(("backend", "rule", "dtype"), paired(BACKENDS, RULES, [*LEAST]))
@pytest.mark.parametrize("special", [False, True], ids=["usual", "special"])
def test_the_bits_are_those_of_a_step_that_reads_the_parameter(
    backend: str, rule: str, dtype: str, special: bool
) -> None:
    master = edges(dtype) if special else None
    (ours, alone), (theirs, both) = (trained(rule, backend, dtype, each, master=master) for each in (True, False))
    assert (reads_parameter(alone), reads_parameter(both)) == (False, True)
    check_same(ours, theirs)
    assert special or not same_bits(theirs[0]["param::master"], theirs[-1]["param::master"])


@pytest.mark.parametrize(("backend", "dtype"), paired(BACKENDS, [*LEAST]))
def test_a_copy_that_overflows_counts_as_its_infinite_parameter(backend: str, dtype: str) -> None:
    """Two steps of a rule that stores the weight it sees, against NumPy's own rounding of the copy."""
    values = edges(dtype)
    engine = Engine(KEEP, NumpyArrays(), backend, weights="master", exclusive=True)
    param = np.zeros(values.shape, NUMPY[dtype])
    number = engine.add(param, 0, "w")
    hyper = engine.hyper_table([default_hyper(KEEP, {}, dtype)])
    for gradient in (values, np.zeros_like(values)):
        engine.step((number,), [gradient], hyper)
        with np.errstate(over="ignore", invalid="ignore"):
            assert same_bits(param, gradient.astype(NUMPY[dtype]))
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(NUMPY[dtype]).astype(np.float32)
    assert np.isinf(near).sum() > np.isinf(values).sum()
    assert same_bits(engine.state(number)["m"], np.where(np.isinf(near), near, values))


@pytest.mark.parametrize("rule", RULES)
def test_statistics_read_the_copy_alone(rule: str) -> None:
    (ours, _), (theirs, _) = (trained(rule, "cpu", "bfloat16", each, WATCH, steps=4) for each in (True, False))
    numbers = [f"{name}/w" for name in WATCH]
    for mine, other in zip(ours, theirs, strict=True):  # neighbours are added in float32, in an order of the compiler
        np.testing.assert_allclose([mine.pop(n) for n in numbers], [other.pop(n) for n in numbers], rtol=2.0**-20)
    check_same(ours, theirs)
    measured = compile(rulec.load(rule), memory=EXCLUSIVE, watch=watched(rulec.load(rule), WATCH))
    assert measured.statistics
    assert not reads_parameter(measured)


@pytest.mark.parametrize("rule", by_kind(single()))
def test_no_rule_reads_the_parameter(rule: str) -> None:
    program = compile(loaded(rule), memory=EXCLUSIVE)
    assert not reads_parameter(program)
    assert not reads_parameter(scheduled(program, layout_for(program, "bfloat16")).program)


def test_a_step_moves_fewer_bytes() -> None:
    """AdamW: gradient, copy and two states are read; the parameter, the copy and the states are written."""

    def bytes_of(memory: Memory) -> tuple[float, float]:
        program = compile(rulec.load("adamw"), memory=memory)
        return traffic(program, layout_for(program, "bfloat16", states={"m": "float32", "v": "float32"}))

    assert bytes_of(EXCLUSIVE) == (14, 14)
    assert bytes_of(Memory("master")) == (16, 14)


@pytest.mark.parametrize(
    ("step", "reads"),
    [
        ("p = g", False),
        ("direction = g", True),
        ("p = g*norm(p)", True),
        ("p = newton_schulz(g)", False),
        ("p = newton_schulz(p)", True),
        ("p = where(sum(g) > 0, g, p)", True),
    ],
)
def test_reads_of_stages_and_between_them(step: str, reads: bool) -> None:
    program = compile(rulec.parse(f"name: A\nsummary: A.\nhyper: {{lr: 1e-3}}\nstep: |\n  {step}\n"))
    assert reads_parameter(program) is reads


def test_other_parameters_are_read_as_before() -> None:
    """Those of float32, and other kinds, whose weight is of the parameter and of what lies beside it."""
    rule = rulec.load("adamw")
    assert Storage({}, "master", exclusive=True).memory_of(rule, "bfloat16") == EXCLUSIVE
    assert Storage({}, "master", exclusive=True).memory_of(rule, "float32") == Memory()
    for kind in DTYPES:
        memory = Storage({}, kind, exclusive=True).memory_of(rule, "bfloat16")
        assert reads_parameter(compile(rule, memory=memory)) is (kind != "master")


def stepped(backend: Any, dtype: str, memory: Memory, rule: str = "adamw") -> list[dict[str, Array]]:
    """The parameter and states of one kernel after each of five calls, from weights that overflow among others."""
    subject, program = conformance._subject(backend, None, None), compile(rulec.load(rule), memory=memory)
    layout = layout_for(program, dtype, states={"m": "float32", "v": "float32"})
    param = np.random.default_rng(0).standard_normal((24, 40))
    trial = Trial(subject, rulec.load(rule), program, layout, [param], [{"lr": 1e-3}])
    master = param.astype(np.float32)
    master.reshape(-1)[: edges(dtype).size] = edges(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        trial.params = [subject.kind.make(master.astype(NUMPY[dtype]), 0)]
    trial.states[0]["param::master"] = subject.kind.make(master, 0)
    trial.call = trial.kernel.bind(trial.params, trial.states)
    seen = []
    for step in range(5):
        trial.step({0: np.random.default_rng(step).standard_normal((24, 40))}, judged=False)
        seen.append({name: np.array(each) for name, each in trial.values(0).items()})
    return seen


@pytest.mark.parametrize("dtype", LEAST)
def test_jax_has_the_same_bits(dtype: str) -> None:
    pytest.importorskip("jax")
    check_same(stepped("jax", dtype, EXCLUSIVE), stepped("jax", dtype, Memory("master")))


@needs_compiler
@pytest.mark.parametrize("dtype", LEAST)
def test_cuda_has_the_same_bits(cupy: Any, dtype: str) -> None:
    check_same(stepped(CupyBackend(), dtype, EXCLUSIVE), stepped(CupyBackend(), dtype, Memory("master")))


TRITON = """
from tests.backends.test_exclusive import EXCLUSIVE, LEAST, Memory, check_same, stepped
for dtype in LEAST:
    check_same(stepped("triton", dtype, EXCLUSIVE), stepped("triton", dtype, Memory("master")))
"""


@pytest.mark.slow
def test_triton_has_the_same_bits() -> None:
    check_in_interpreter(TRITON)
