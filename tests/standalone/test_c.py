"""The C that `rulec build` writes, against the reference and the cpu backend."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array.arrays import numpy_dtype
from rulec.compiler.pipeline import compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.routing import applies
from rulec.language.expr.node import Kind, Op, walk
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import written
from rulec_backends.c.standalone import numbers, step
from rulec_backends.c.standalone.model import CFile
from tests.backends.kinds import ELEMENTWISE
from tests.library import by_kind, by_share, single
from tests.standalone.c_library import CRule, CRun, address, drawn

SHAPES = ((5,), (7, 3), (2, 3, 4, 5), (), (1,), (0,), (0, 4), (3, 4100), (70, 2), (8192 * 2 + 3,))

COMPOSED = (
    "clip_by_norm >> adamw", "lookahead(adam, k=2)", "accumulate(momentum, every=3)", "lion >> cautious",
    "adam >> trust_ratio", "adaptive_clip >> sgd", "centralize >> adam", "ema(sgd)", "schedule_free(adam)",
    "lookahead(adafactor, k=2)", "clip_by_norm >> came", "lookahead(accumulate(adamw, every=2), k=2)",
)  # fmt: skip

#: Operations that give the same bits everywhere.
EXACT = {
    Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.SQRT, Op.RSQRT, Op.ABS, Op.WHERE, Op.SIGN, Op.MINIMUM, Op.MAXIMUM,
    Op.FLOOR, Op.FLOORDIV,
}  # fmt: skip


#: What the header says to compile with.
FAST = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")


#: Rules that C is not written for -> a word of the reason, where `refusals` does not see it.
REFUSED = {
    **dict.fromkeys(("polargrad", "spel"), "other coefficients than Muon's"),
    **dict.fromkeys(("dualadam", "stable_spam"), "may be one on the shape"),
}

#: Rules with a product of matrices, of which `test_newton_schulz` steps some.
MATRICES = ("adago", "adamuon", "muon", "normuon", "scion", "transforms/orthogonalize")


def names() -> list[str]:
    """Every rule that runs by itself on gradients without a product of matrices, and some composed of them."""
    members = set(rulec.rules(wrappers=False)) & set(single())
    return [name for name in (*sorted(members), *COMPOSED) if name not in MATRICES]


def refusals(name: str) -> list[str]:
    """Why C cannot be written for a rule, in words of the errors: one of them is raised."""
    rule = rulec.load(name)
    nodes = [*walk(rule.expressions)]
    known = (Op.NEWTON_SCHULZ, Op.MATMUL, Op.TRANSPOSE)
    reasons = {
        "over all tensors of the": any(n.op.kind is Kind.REDUCE and n.arg in ("group", "model") for n in nodes),
        "draws random numbers": any(n.op.kind is Kind.RANDOM for n in nodes),
        "needs the matrix function": any(n.op.kind is Kind.MATRIX and n.op not in known for n in nodes),
        "depends on the number of dimensions": any(state.per == "axis" for state in rule.state.values()),
        REFUSED.get(name, ""): name in REFUSED,
    }
    return [words for words, holds in reasons.items() if holds]


def alone(rule: rulec.Rule, params: Sequence[Any]) -> ReferenceOptimizer:
    """The reference for tensors each of which is a group by itself, as they are in C."""
    return ReferenceOptimizer(rule, params, [{}] * len(params), groups=range(len(params)))


def taken(rule: rulec.Rule, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The shapes that a rule applies to: C has nothing of the rule for the others."""
    return tuple(shape for shape in shapes if applies(rule, shape, ()))


@pytest.mark.parametrize("name", by_kind(names()))
def test_steps_are_the_references(name: str, tmp_path: Path) -> None:
    if words := refusals(name):
        with pytest.raises(CannotBuild, match="|".join(words)):
            CFile(rulec.load(name), "rule", "float32", Storage())
        return
    rule = rulec.load(name)
    params, steps = drawn(0, taken(rule, SHAPES), 7)
    reference = alone(rule, params)
    run = CRun(CRule(rule, tmp_path, "float64"), params)
    for number, grads in enumerate(steps):
        given: list[Any] = [g if number != 3 or i % 2 else None for i, g in enumerate(grads)]
        reference.step(given)
        run.step(given)
        for ours, theirs in zip(run.arrays, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)


TURNED = """
name: Turned
hyper: {lr: 0.1}
view: {short: first}
state: {r: {init: 1, per: row}}
step: |
  r = 0.5*r + 0.5*mean(g**2, per="row")
  direction = newton_schulz(g/sqrt(r), steps=3, dtype="float64") + sum(g, per="col")/rows
"""


def loaded(name: str) -> rulec.Rule:
    """A rule by its text or its name, which may say that it is by Gram matrices."""
    if "\n" in name:
        return rulec.parse(name)
    known, _, form = name.partition(", ")
    return rulec.load(known).in_form(form) if form else rulec.load(known)


BOTH = """
name: Both
hyper: {lr: 0.1}
step: |
  direction = newton_schulz(g, steps=4, form="gram") + newton_schulz(g, steps=2)
"""


@pytest.mark.parametrize(
    "name",
    ["muon", "muon, gram", "normuon", "orthogonalize >> momentum", "orthogonalize >> momentum, gram", TURNED, BOTH],
)
def test_newton_schulz(name: str, tmp_path: Path) -> None:
    rule = loaded(name)
    shapes = ((7, 3), (3, 7), (5, 5), (1, 4), (90, 33), (0, 3))
    params, steps = drawn(14, shapes if name.startswith("muon") else (*shapes, (2, 3, 4)), 4)
    reference = alone(rule, params)
    run = CRun(CRule(rule, tmp_path, "float64", "", "-fopenmp"), params)
    for grads in steps:
        reference.step(grads)
        run.step(grads)
        for ours, theirs in zip(run.arrays, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


COUNTED = (
    'name: Counted\nhyper: {{n: {}}}\nstep: |\n  direction = newton_schulz(g, steps=n, dtype="float32", form="{}")\n'
)


def test_iterations_by_gram_matrices_are_in_pairs(tmp_path: Path) -> None:
    """They have other bits than the direct form from two iterations on, unless the matrix is square."""
    shapes = ((5, 5), (3, 7), (70, 9))
    grads = drawn(3, shapes, 1)[1][0]

    def stepped(form: str) -> dict[tuple[int, int], list[bytes]]:
        rule = CRule(rulec.parse(COUNTED.format(5, form)), kept_in(tmp_path / form))
        results = {}
        for steps in (0, 1, 2, 3, 5):
            run = CRun(rule, [np.zeros(shape) for shape in shapes], {"n": steps})
            run.step(grads, {"n": steps})
            results |= {(steps, k): x.tobytes() for k, x in enumerate(run.arrays)}
        return results

    direct, gram = stepped("direct"), stepped("gram")
    assert {key for key in direct if direct[key] != gram[key]} == {(n, k) for n in (2, 3, 5) for k in (1, 2)}


def kept_in(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir()
    return folder


def test_a_matrix_with_a_nan_leaves_its_neighbours(tmp_path: Path) -> None:
    rule = rulec.parse('name: Batch\nstep: |\n  direction = newton_schulz(g, steps=3, dtype="bfloat16")\n')
    run = CRun(CRule(rule, tmp_path), [np.ones((2, 3, 4))])
    grads = np.random.default_rng(0).standard_normal((2, 3, 4))
    grads[0, 1, 1] = np.nan
    run.step([grads])
    assert np.isnan(run.arrays[0][0, 1, 1])
    assert np.isfinite(run.arrays[0][1]).all()


def is_exact(name: str) -> bool:
    """Whether a rule is elementwise and its kernel uses nothing but what IEEE rounds correctly."""
    program = compile(rulec.load(name))
    values = walk(program.stages[0].roots)
    plain = all(v.op in EXACT or v.op.kind in (Kind.LEAF, Kind.COMPARE, Kind.LOGIC) for v in values)
    return program.elementwise and not program.predicates and plain


def each_with_half(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every rule in float32 and in one of the dtypes of sixteen bits, by turns."""
    return [(n, d) for i, n in enumerate(names) for d in ("float32", ("bfloat16", "float16")[i % 2])]


@pytest.mark.parametrize(("name", "dtype"), each_with_half([name for name in ELEMENTWISE if name != "madgrad"]))
def test_bits_are_the_cpu_backends(name: str, dtype: str, tmp_path: Path) -> None:
    check_bits(name, dtype, tmp_path)


@pytest.mark.parametrize("chosen", by_share(names(), "bits of C files"))
def test_bits_of_every_exact_rule_are_the_cpu_backends(chosen: list[str], tmp_path: Path) -> None:
    exact = [name for name in chosen if not refusals(name) and is_exact(name)]
    assert exact
    for number, (name, dtype) in enumerate(each_with_half(exact)):
        (tmp_path / str(number)).mkdir()
        check_bits(name, dtype, tmp_path / str(number))


def check_bits(name: str, dtype: str, folder: Path) -> None:
    """Scalars are float64 on both sides and rounded to float32 once: powers that differ in a last bit do not show.

    What the manual says to compile with changes no bit either.
    """
    rule = rulec.load(name)
    params, steps = drawn(1, taken(rule, ((33,), (5, 7), (8192 + 5,))), 4)
    arrays = [p.astype(numpy_dtype(dtype)) for p in params]
    run = CRun(CRule(rule, folder, dtype, "", *(FAST if dtype == "float32" else ())), arrays)
    optimizers = [rulec.array.Optimizer(rule, [a], backend="cpu") for a in arrays]
    for grads in steps:
        run.step(grads)
        for optimizer, grad in zip(optimizers, grads, strict=True):
            optimizer.step([grad.astype(numpy_dtype(dtype))])
    for ours, theirs in zip(run.arrays, arrays, strict=True):
        assert ours.tobytes() == theirs.tobytes()


#: Rules, the dtypes of their tensors and of their states: all dtypes of an elementwise rule, two of each rule that
#: reduces or keeps rows.
DTYPES = [
    *(
        ("adamw", *d)
        for d in (("float32", ""), ("float32", "float64"), ("float64", "float32"), ("bfloat16", "float32"))
    ),
    ("nadam", "float16", "float32"),
    *((name, *d) for name in ("lamb", "adam_mini") for d in (("float32", ""), ("bfloat16", "float32"))),
    *((name, *d) for name in ("adafactor", "sm3") for d in (("float32", "float64"), ("float16", "float32"))),
]


@pytest.mark.parametrize(("name", "dtype", "state_dtype"), DTYPES)
def test_dtypes(name: str, dtype: str, state_dtype: str, tmp_path: Path) -> None:
    rule = rulec.load(name)
    params, steps = drawn(2, ((6, 5), (40,)), 3)
    rounded = [p.astype(numpy_dtype(dtype)) for p in params]
    reference = alone(rule, [r.astype(np.float64) for r in rounded])
    run = CRun(CRule(rule, tmp_path, dtype, state_dtype), rounded)
    start = [p.copy() for p in reference.params]
    for grads in steps:
        given = [g.astype(numpy_dtype(dtype)).astype(np.float64) for g in grads]
        run.step(given)
        reference.step(given)
    precision = {"float64": 3e-6, "float32": 3e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for ours, theirs, before in zip(run.arrays, reference.params, start, strict=True):
        assert np.abs(theirs - before).max() > 1e-3
        np.testing.assert_allclose(ours.astype(np.float64), theirs, atol=precision * np.abs(theirs).max(), rtol=0)


@pytest.mark.another
@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor", "came", "lookahead(adam, k=2)"])
def test_threads_change_no_bit(name: str, tmp_path: Path) -> None:
    rule = rulec.load(name)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nimport rulec\nfrom tests.standalone.c_library import CRule, CRun, drawn\n"
        "params, steps = drawn(3, ((200, 4100), (50000,)), 3)\n"
        "run = CRun(CRule(rulec.load(sys.argv[2]), Path(sys.argv[3]), 'float32', '', '-fopenmp'), params)\n"
        "for grads in steps: run.step(grads)\n"
        "import hashlib; print([hashlib.sha256(a.tobytes()).hexdigest() for a in run.arrays])\n"
    )
    root = str(Path(__file__).parents[2])
    printed = []
    for threads in ("1", "3"):
        done = subprocess.run(
            [sys.executable, "-c", program, root, name, str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": threads},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    params, steps = drawn(3, ((200, 4100), (50000,)), 3)
    plain = CRun(CRule(rule, tmp_path), params)
    for grads in steps:
        plain.step(grads)
    assert all(np.isfinite(a).all() for a in plain.arrays)


def test_hyper_parameters_may_change_and_default(tmp_path: Path) -> None:
    rule = rulec.load("adamw")
    params, steps = drawn(4, ((4, 3),), 4)
    built_rule = CRule(rule, tmp_path, "float64")
    run, reference = CRun(built_rule, params), ReferenceOptimizer(rule, params)
    for number, grads in enumerate(steps):
        given = {"lr": 0.01 * (number + 1), "weight_decay": 0.1}
        run.step(grads, given)
        reference.step(grads, given)
    np.testing.assert_allclose(run.arrays[0], reference.params[0], rtol=1e-12)
    assert built_rule.function("steps")(address(run.states[0])) == 4
    by_default, by_null = CRun(built_rule, params), CRun(built_rule, params)
    by_default.step(steps[0])
    grad = np.ascontiguousarray(steps[0][0])
    size = built_rule.size((4, 3))
    array = by_null.arrays[0]
    assert built_rule.function("step")(address(array), address(grad), address(by_null.states[0]), *size, None) == 0
    assert by_default.arrays[0].tobytes() == array.tobytes()


def test_a_copied_block_is_a_checkpoint(tmp_path: Path) -> None:
    params, steps = drawn(5, ((9, 4),), 6)
    rule = CRule(rulec.load("lamb"), tmp_path)
    run = CRun(rule, params)
    for grads in steps[:3]:
        run.step(grads)
    saved = run.arrays[0].copy(), run.states[0].copy()
    for grads in steps[3:]:
        run.step(grads)
    again = CRun(rule, params)
    again.arrays[0][...], again.states[0] = saved
    for grads in steps[3:]:
        again.step(grads)
    assert again.arrays[0].tobytes() == run.arrays[0].tobytes()


@pytest.mark.parametrize(
    "name", ["schedule_free_adamw", "schedule_free(adam)", "ema(sgd)", "ema(novograd)", "ema(adafactor)"]
)
def test_evaluation_points(name: str, tmp_path: Path) -> None:
    rule = rulec.load(name)
    params, steps = drawn(6, ((4, 3), (5,)), 5)
    run = CRun(CRule(rule, tmp_path, "float64"), params)
    arrays = [p.copy() for p in params]
    optimizer = rulec.array.Optimizer(rule, arrays, backend="numpy")
    for grads in steps:
        run.step(grads)
        optimizer.step([g.copy() for g in grads])
    trained = [a.copy() for a in run.arrays]
    run.move("to_evaluation")
    optimizer.eval()
    for ours, theirs, before in zip(run.arrays, arrays, trained, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
        assert not np.allclose(ours, before, rtol=1e-6)
    run.move("to_training")
    for ours, before in zip(run.arrays, trained, strict=True):
        np.testing.assert_allclose(ours, before, rtol=1e-12)
    assert run.rule.function("steps")(address(run.states[0])) == 5


# Rules that the library has none like


ROWS_OF_TALL = """
name: RowsOfTall
hyper: {lr: 0.1}
view: {short: first}
state: {r: {init: 1, per: row}, c: {init: 2*lr, per: col}, k: {init: 0.5, per: matrix}}
step: |
  r = 0.5*r + max(abs(g), per="row")
  c = c + min(g, per="col")/rows
  k = k + sum(g, per="matrix")
  direction = g/r + c*k + mean(p, per="matrix")
"""

PER_TENSOR = """
name: PerTensor
hyper: {lr: 0.1, short: {default: 3, min: 1, max: 100}, eps: 1e-8}
state: {double: 0, big: {init: 0, per: tensor}, last: {init: 1, per: tensor}, start: p**2 + eps}
skip: norm(g) > 100
step: |
  last = big
  big = maximum(big, max(abs(g)))
  double = 0.5*double + g
  if t % short == 0:
    direction = double/(big + eps)
  else:
    direction = sign(double)*exp(-abs(g)) + g % 0.3 + tanh(last) + cbrt(start) + erf(g)
"""

LOSS = """
name: Loss
hyper: {lr: 0.1}
inputs: {loss: scalar, curvature: like p}
state: {m: 0}
step: |
  m = 0.9*m + g*loss
  direction = m/maximum(curvature, 0.1)
"""

BY_SIZE = """
name: BySize
hyper: {lr: 0.1, wide: {default: 1, static: true}}
state: {m: {init: 0, if: numel > 20}}
step: |
  if numel > 20:
    m = 0.9*m + g
    direction = m
  elif rows*wide >= 3:
    direction = g/cols
  else:
    direction = sign(g)*machine_eps + g
"""


BRANCHED = """
name: Branched
hyper: {lr: 0.1}
state: {m: 0}
step: |
  if t % 2 == 0:
    a = 3
    b = 2
    c = 1.5
    m = 0
  else:
    a = mean(g, per="row")
    b = max(g, per="col")
    c = sum(g, per="matrix")
    m = m + g
  direction = g + sum(a) + norm(b) + sum(c) + 0.01*sum(m + 1)
"""


@pytest.mark.parametrize(
    "text", [ROWS_OF_TALL, PER_TENSOR, BY_SIZE, BRANCHED], ids=["rows", "tensor", "size", "branches"]
)
def test_other_rules(text: str, tmp_path: Path) -> None:
    rule = rulec.parse(text)
    params, steps = drawn(7, ((5, 3), (3, 5), (2, 4, 2), (6,), (300, 90), (2, 2)), 5)
    reference = alone(rule, params)
    run = CRun(CRule(rule, tmp_path, "float64"), params)
    for number, grads in enumerate(steps):
        given = [g * (1e6 if number == 2 and i == 0 else 1) for i, g in enumerate(grads)]
        reference.step(given)
        run.step(given)
        for ours, theirs in zip(run.arrays, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)
    counts = [run.rule.function("steps")(address(state)) for state in run.states]
    assert counts == [t.t for t in reference.tensors]


def test_inputs(tmp_path: Path) -> None:
    rule = rulec.parse(LOSS)
    (param,), ((grad,), (curvature,)) = drawn(8, ((4, 3),), 2)
    built_rule = CRule(rule, tmp_path, "float64")
    run, reference = CRun(built_rule, [param]), ReferenceOptimizer(rule, [param])
    reference.step([grad], inputs={"loss": 2.5, "curvature": [curvature]})
    array, hyper = run.arrays[0], built_rule.hyper({})
    given = [address(np.ascontiguousarray(x)) for x in (grad, curvature)]
    size = built_rule.size(param.shape)
    step = built_rule.function("step")
    assert step(address(array), given[0], address(run.states[0]), *size, ctypes.c_double(2.5), given[1], hyper) == 0
    np.testing.assert_allclose(array, reference.params[0], rtol=1e-14)
    assert step(address(array), given[0], address(run.states[0]), *size, ctypes.c_double(2.5), None, hyper) == 1


# What is refused


def test_wrong_calls_write_nothing(tmp_path: Path) -> None:
    params, ((grad, _), *_) = drawn(9, ((4, 3), (2, 6)), 1)
    rule = CRule(rulec.load("adafactor"), tmp_path, "float64")
    run = CRun(rule, params)
    array, state, size = run.arrays[0], run.states[0], rule.size((4, 3))
    before = array.tobytes(), state.tobytes()
    step, message = rule.function("step"), rule.function("message")
    wrong = {
        b"a pointer is NULL, or a size is negative": [
            (None, address(grad), address(state), *size, None), (address(array), None, address(state), *size, None),
            (address(array), address(grad), None, *size, None),
            (address(array), address(grad), address(state), *rule.size((4, -3)), None),
        ],
        b"a hyper-parameter is outside its range": [
            (address(array), address(grad), address(state), *size, rule.hyper({"lr": -1.0})),
            (address(array), address(grad), address(state), *size, rule.hyper({"d": np.nan})),
        ],
        b"the state block was not initialised for a tensor of this shape": [
            (address(array), address(grad), address(state), *rule.size((3, 4)), None),
            (address(array), address(grad), address(np.zeros(4096, np.uint8)), *size, None),
        ],
    }  # fmt: skip
    for text, calls in wrong.items():
        for call in calls:
            assert message(step(*call)) == text
            assert (array.tobytes(), state.tobytes()) == before
    assert rule.function("state_bytes")(*rule.size((4, -3))) == 0
    assert rule.function("steps")(address(np.zeros(64, np.uint8))) == -1
    assert message(99) == b"no status of this rule"


def test_a_rule_that_does_not_apply(tmp_path: Path) -> None:
    text = (
        'name: Matrices\napplies_to: ndim == 2 and not tagged("head")\nstep: |\n  direction = g - mean(g, per="row")\n'
    )
    rule = CRule(rulec.parse(text), tmp_path)
    state, array = np.zeros(256, np.uint8), np.zeros(6, np.float32)
    assert rule.function("init")(address(state), address(array), *rule.size((2, 3)), None) == 0
    status = rule.function("init")(address(state), address(array), *rule.size((6,)), None)
    assert rule.function("message")(status) == b"the rule does not apply to a tensor of this shape"


def test_alternatives_of_a_shape_stand_beside_another_condition(tmp_path: Path) -> None:
    """`a or b` beside `c` chose the case of `a or (b and c)`; the compiler's warnings are errors here."""
    text = (
        "name: Cases\nstep: |\n  if ndim < 2 or rows == 1:\n    x = g\n  else:\n    x = 2*g\n"
        "  if cols > 4:\n    direction = x\n  else:\n    direction = 3*x\n"
    )
    source = written(rulec.parse(text), "c").values()
    assert any("||" in line and "&& !(" in line for text in source for line in text.splitlines())
    CRule(rulec.parse(text), tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("prodigy", "it takes a sum over all tensors of the model, and what is written updates one alone"),
        ("clip_by_global_norm >> adamw", "it takes a sum over all tensors of the model"),
        ("shampoo", "it needs the matrix function"),
        ("apollo", "it draws random numbers"),
    ],
)
def test_what_has_no_such_form(name: str, why: str) -> None:
    with pytest.raises(CannotBuild, match=f"rulec build cannot write .* as C: {why}"):
        written(rulec.load(name), "c")


def test_other_coefficients_than_muons_are_refused() -> None:
    step = 'direction = newton_schulz(g, steps=3, coefficients="{}")'
    assert written(rulec.parse(f"name: Known\nstep: |\n  {step.format('muon')}"), "c")
    with pytest.raises(CannotBuild, match="other coefficients than Muon's"):
        written(rulec.parse(f"name: Other\nstep: |\n  {step.format('polar_express')}"), "c")
    with pytest.raises(CannotBuild, match="divides by something else than the norm"):
        written(rulec.parse("name: Undivided\nstep: |\n  direction = newton_schulz(g, normalize=1.02)"), "c")


@pytest.mark.slow
def test_the_same_rule_gives_the_same_bytes() -> None:
    program = (
        "import hashlib, rulec\nfrom rulec.standalone.prose import written\n"
        "rules = {'c': ('adamw', 'adafactor', 'lookahead(adam, k=2)', 'schedule_free_adamw', 'muon')}\n"
        "rules |= dict.fromkeys(('triton', 'cupy', 'jax', 'numpy'), ('adamw', 'nadam', 'madgrad'))\n"
        "for backend, names in rules.items():\n"
        "    for name in names:\n"
        "        for file, text in written(rulec.load(name), backend).items():\n"
        "            print(backend, file, hashlib.sha256(text.encode()).hexdigest())\n"
    )
    printed = [
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
                       text=True, check=True).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == 5 * 4 + 4 * 3


@pytest.mark.parametrize("name", ["adamw", "adafactor", "clip_by_norm >> adamw"])
def test_texts_are_tidy(name: str) -> None:
    for file, text in written(rulec.load(name), "c").items():
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert not [line for line in text.splitlines() if line != line.rstrip() or "\t" in line or len(line) > 132], (
            file
        )
        assert str(Path.cwd()) not in text
        assert "MIT" in text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loops"), [("adamw", 1), ("lion", 1), ("lamb", 2), ("adafactor", 5)])
def test_loops_over_elements_become_vectors(name: str, loops: int, tmp_path: Path) -> None:
    """GCC says so of the loop of every stage."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    for file, text in written(rulec.load(name), "c").items():
        (tmp_path / file).write_text(text)
    command = [
        "gcc",
        "-std=c99",
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fopenmp",
        "-fopt-info-vec-optimized",
    ]
    done = subprocess.run(
        [*command, "-c", "-o", "rule.o", f"{name}.c"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    vectors = {int(line.split(":")[1]) for line in done.stderr.splitlines() if "loop vectorized" in line}
    found = []
    lines = (tmp_path / f"{name}.c").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        over_elements = line.strip() in (
            "for (int64_t i = start; i < stop; i++) {", "for (int64_t j = left; j < right; j++) {",
        )  # fmt: skip
        if over_elements and not lines[number].endswith("= 0.0;"):  # which becomes a call of memset
            found.append(any(abs(number - v) <= 3 for v in vectors))
    assert found == [True] * loops


def test_a_branch_that_asks_for_no_count_declares_none(tmp_path: Path) -> None:
    text = "name: Warm\nhyper: {warm: 20}\nstep: |\n  if warm > 0:\n    a = minimum(t/warm, 1)\n  else:\n    a = 1\n"
    # The compiler is strict: what is declared and not used is an error.
    assert CRule(rulec.parse(text + "  direction = a*g\n"), tmp_path).function("step")


def test_a_reserved_word_more_changes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(written(rulec.load("adafactor"), "c"))
    for module in (numbers, step):
        monkeypatch.setattr(module, "RESERVED", module.RESERVED | {"word_of_nobody"})
    assert dict(written(rulec.load("adafactor"), "c")) == before
