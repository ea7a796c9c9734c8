"""The one-file optimizers that `rulec build` writes for torch, JAX and NumPy, where rulec cannot be imported."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rulec
import rulec.array
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import written
from tests.backends import cuda_assembly
from tests.standalone.c_library import drawn
from tests.standalone.one_file import STAND_IN, Array, Case, check_ran

SHAPES = ((5,), (7, 3), (), (1100,), (0,))
RULES = (
    "adamw", "nadam", "lion", "madgrad", "asgd", "rprop", "adamg", "clip_by_value >> adan", "lookahead(adam, k=2)",
)  # fmt: skip

NUMPY = """
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and v.__module__ == "rule")
params = [p.copy() for p in params]
optimizer = kind(params)
for grads in steps:
    optimizer.step(grads)
leave(params)
"""

JAX = """
import jax
import jax.numpy as jnp
import rule
init, update = rule.rule()
tree = {"a": jnp.asarray(params[0]), "b": [jnp.asarray(p) for p in params[1:]]}
state = init(tree)


@jax.jit
def step(tree, state, grads):
    updates, state = update(grads, state, tree)
    return jax.tree.map(jnp.add, tree, updates), state


for grads in steps:
    tree, state = step(tree, state, {"a": jnp.asarray(grads[0]), "b": [jnp.asarray(g) for g in grads[1:]]})
assert int(state.step) == len(steps)
leave([tree["a"], *tree["b"]])
"""

TORCH = """
import copy
import torch
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer))
tensors = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in params]
optimizer = kind([{"params": tensors[:2]}, {"params": tensors[2:]}])
for number, grads in enumerate(steps):
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = torch.from_numpy(grad)
    versions = [t._version for t in tensors if t.numel()]
    optimizer.step()
    assert all(t._version > before for t, before in zip((t for t in tensors if t.numel()), versions, strict=True))
    if number == 1:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kind([{"params": tensors[:2]}, {"params": tensors[2:]}])
        optimizer.load_state_dict(saved)
    if number == 2:
        optimizer = copy.deepcopy({"o": optimizer, "t": tensors})
        optimizer, tensors = optimizer["o"], optimizer["t"]
leave([t.detach().numpy() for t in tensors])
"""

CUPY = """
import sys
import cuda_stand_in
sys.modules["cupy"] = cuda_stand_in.CUPY
import cupy
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and v.__module__ == "rule")
arrays = [cupy.asarray(p) for p in params]
optimizer = kind(arrays)
for grads in steps:
    optimizer.step([cupy.asarray(g) for g in grads])
leave([a.get() for a in arrays])
"""

PROGRAMS = {"numpy": NUMPY, "jax": JAX, "triton": TORCH, "cupy": CUPY}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, but for the stand-in for CuPy."""
    for name in STAND_IN:
        shutil.copy(Path(__file__).parents[1] / "backends" / name, tmp_path)
    return tmp_path


def skip_without_a_compiler(backend: str) -> None:
    if backend == "cupy" and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")


def reference(rule: str, params: list[Array], steps: list[list[Array]]) -> list[Array]:
    found = ReferenceOptimizer(rulec.load(rule), [p.astype(np.float64) for p in params])
    for grads in steps:
        found.step([g.astype(np.float64) for g in grads])
    return found.params


#: JAX and Triton's interpreter take seconds: their texts are kept in tests/golden and their kernels run in
#: tests/backends.
EVERY_PROGRAM = [pytest.param(n, marks=pytest.mark.slow) if n in ("jax", "triton") else n for n in PROGRAMS]


@pytest.mark.parametrize("backend", EVERY_PROGRAM)
def test_steps_are_the_references(backend: str, folder: Path) -> None:
    skip_without_a_compiler(backend)
    params, steps = drawn(10, SHAPES, 4)
    given = [p.astype(np.float32) for p in params], [[g.astype(np.float32) for g in grads] for grads in steps]
    left = check_ran(folder, backend, PROGRAMS[backend], *(Case(rule, *given) for rule in RULES))
    for rule, arrays in zip(RULES, left, strict=True):
        for ours, theirs, before in zip(arrays, reference(rule, params, steps), params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=3e-7, err_msg=rule)
            assert ours.dtype == np.float32
            assert ours.size < 1000 or np.abs(ours - before).max() > 1e-4, rule


CHAINED = JAX.replace(
    "init, update = rule.rule()", "import optax\ninit, update = optax.chain(optax.scale(0.5), rule.rule())"
)


@pytest.mark.slow
def test_jaxs_can_stand_in_a_chain_of_optax(tmp_path: Path) -> None:
    params, steps = drawn(17, SHAPES, 3)
    program = CHAINED.replace("assert int(state.step)", "assert int(state[1].step)")
    (found,) = check_ran(tmp_path, "jax", program, Case("adan", params, steps, "float64"))
    theirs = reference("adan", params, [[0.5 * g for g in grads] for grads in steps])
    for ours, expected in zip(found, theirs, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)


SCHEDULED = JAX.replace("rule.rule()", "rule.rule(lr=lambda count: 0.1 / (1 + count))")


@pytest.mark.slow
def test_the_learning_rate_of_jax_may_be_a_schedule(tmp_path: Path) -> None:
    params, steps = drawn(16, SHAPES, 4)
    (found,) = check_ran(tmp_path, "jax", SCHEDULED, Case("adamw", params, steps, "float64"))
    reference = ReferenceOptimizer(rulec.load("adamw"), params)
    for count, grads in enumerate(steps):
        reference.step(grads, {"lr": 0.1 / (1 + count)})
    for ours, theirs in zip(found, reference.params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("backend", PROGRAMS)
def test_float64(backend: str, folder: Path) -> None:
    skip_without_a_compiler(backend)
    params, steps = drawn(11, SHAPES, 4)
    (found,) = check_ran(folder, backend, PROGRAMS[backend], Case("nadam", params, steps, "float64"))
    for ours, theirs in zip(found, reference("nadam", params, steps), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_states_of_another_dtype_are_kept_by_torch(tmp_path: Path) -> None:
    params, steps = drawn(12, SHAPES, 4)
    rounded = [p.astype(np.float16) for p in params]
    given = [[g.astype(np.float16) for g in grads] for grads in steps]
    check = '\nassert all(s["m"].dtype == torch.float32 for s in optimizer.state.values())\n'
    (found,) = check_ran(
        tmp_path, "triton", TORCH + check, Case("adamw", rounded, given, "float16", Storage({"": "float32"}))
    )
    for ours, theirs in zip(found, reference("adamw", rounded, given), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=4e-3, atol=1e-3)


@pytest.mark.slow
def test_tensors_in_main_memory_are_refused_in_a_sentence(tmp_path: Path) -> None:
    ((_, text),) = written(rulec.load("adamw"), "triton", name="rule").items()
    (tmp_path / "rule.py").write_text(text)
    program = (
        "import torch\nfrom rule import Rule\nfor device in ('cpu', 'meta'):\n"
        "    p = torch.nn.Parameter(torch.ones(3, device=device))\n    p.grad = torch.ones_like(p)\n    o = Rule([p])\n"
        "    try:\n        o.step()\n    except ValueError as error:\n        print(error, len(o.state))\n"
    )
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=kept, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        f"parameters must be on a GPU, and one is {where}: move the model there before 0"
        for where in ("in main memory", "on the meta device")
    ]


FOREIGN = """
import copy
import torch
import rule

def tried(saved):
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = rule.Rule([p])
    before = copy.deepcopy(optimizer.state_dict())
    try:
        optimizer.load_state_dict(saved)
        print("loaded")
    except ValueError as error:
        assert optimizer.state_dict() == before
        print(error)

def saved_of(kind, shape=(2, 3), **keywords):
    p = torch.nn.Parameter(torch.ones(shape))
    optimizer = kind([p], **keywords)
    p.grad = torch.ones(shape)
    if kind is not rule.Rule:
        optimizer.step()
    else:  # without a GPU, what its first step makes
        optimizer.state[p].update(m=torch.zeros(shape), v=torch.zeros(shape), step=torch.tensor(1.0))
    return optimizer.state_dict()

tried(saved_of(torch.optim.AdamW))
tried(saved_of(torch.optim.AdamW, amsgrad=True))
tried(saved_of(torch.optim.AdamW, maximize=True))
tried(saved_of(torch.optim.Adamax))
foreign = saved_of(torch.optim.AdamW)
foreign["param_groups"] = saved_of(rule.Rule)["param_groups"]
tried(foreign)
tried(saved_of(rule.Rule, (2, 4)))
tried(saved_of(rule.Rule))
"""


@pytest.mark.slow
def test_what_another_optimizer_saved_is_refused_as_it_is_loaded(tmp_path: Path) -> None:
    ((_, text),) = written(rulec.load("adamw"), "triton", name="rule").items()
    (tmp_path / "rule.py").write_text(text)
    done = subprocess.run([sys.executable, "-c", FOREIGN], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "loaded",
        "torch.optim.AdamW saved amsgrad=True, and this class has amsgrad=False alone",
        "torch.optim.AdamW saved maximize=True, and this class has maximize=False alone",
        "saved states are step, m, exp_inf, without v: load what this class saved",
        "saved states are step, exp_avg, exp_avg_sq, without m: load what this class saved",
        "m has 8 saved numbers for 6 here: load what this class saved",
        "loaded",
    ]


WRONG = """
import jax
import jax.numpy as jnp
import rule
init, update = rule.rule(lr=0.1)
ones = jnp.ones
for p, g in ((ones(3, int), ones(3)), (ones(3), ones(3, int)), (ones(3, complex), ones(3)), (ones((3, 3)), ones(3))):
    for run in (update, jax.jit(update)):
        try:
            run({"w": g}, init({"w": p}), {"w": p})
        except (TypeError, ValueError) as error:
            print(type(error).__name__, error)
print(update({"w": ones(3)}, init({"w": ones(3)}), {"w": ones(3)})[0]["w"].shape)
"""


@pytest.mark.slow
def test_jaxs_refuses_arrays_that_a_step_is_not_for(tmp_path: Path) -> None:
    ((_, text),) = written(rulec.load("lion"), "jax", name="rule").items()
    (tmp_path / "rule.py").write_text(text)
    done = subprocess.run([sys.executable, "-c", WRONG], cwd=tmp_path, check=True, capture_output=True, text=True)
    real = "give both as real floating-point numbers"
    refused = [
        f"TypeError a parameter and its gradient are {p} and {g}: {real}"
        for p, g in (("int32", "float32"), ("float32", "int32"), ("complex64", "float32"))
    ]
    shapes = "ValueError a gradient has shape (3,), and its parameter (3, 3): give equal shapes"
    assert done.stdout.splitlines() == [line for each in (*refused, shapes) for line in (each, each)] + ["(3,)"]


#: The gradients as views of the negatives in memory.
NEGATED = TORCH.replace("torch.from_numpy(grad)", "torch._neg_view(-torch.from_numpy(grad))")


@pytest.mark.slow
def test_gradients_that_lie_negated_are_read_rightly(tmp_path: Path) -> None:
    params, steps = drawn(17, SHAPES, 4)
    found = []
    for number, program in enumerate((TORCH, NEGATED)):
        (tmp_path / str(number)).mkdir()
        found.append(check_ran(tmp_path / str(number), "triton", program, Case("adamw", params, steps, "float64"))[0])
    assert all(np.array_equal(ours, other) for ours, other in zip(*found, strict=True))


def test_torchs_class_takes_the_sign_of_a_gradient_to_memory() -> None:
    ((_, text),) = written(rulec.load("adamw"), "triton", name="rule").items()
    assert "g.resolve_neg().contiguous()" in text
    assert "or p.is_neg()" in text


@pytest.mark.slow
def test_adamw_is_torchs(tmp_path: Path) -> None:
    params, steps = drawn(13, SHAPES, 5)
    given = [p.astype(np.float32) for p in params], [[g.astype(np.float32) for g in grads] for grads in steps]
    (found,) = check_ran(tmp_path, "triton", TORCH, Case("adamw", *given))
    tensors = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in given[0]]
    optimizer = torch.optim.AdamW(tensors)
    for grads in given[1]:
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = torch.from_numpy(grad)
        optimizer.step()
    for ours, theirs in zip(found, tensors, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", [backend for backend in PROGRAMS if backend != "triton"])
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("lamb", "it reduces over a tensor"),
        ("adafactor", "its step depends on the shape of a tensor"),
        ("clip_by_global_norm >> adamw", "it takes a sum over all tensors of the model"),
        ("schedule_free_adamw", "it is evaluated at another point than it is trained"),
    ],
)
def test_what_has_no_such_form(backend: str, rule: str, why: str) -> None:
    with pytest.raises(CannotBuild, match=why):
        written(rulec.load(rule), backend)


@pytest.mark.parametrize("backend", PROGRAMS)
def test_a_step_that_changes_nothing_has_no_such_form(backend: str) -> None:
    with pytest.raises(CannotBuild, match="its step changes no element of a tensor"):
        written(rulec.parse("name: Still\nstep: p = p\n"), backend)


@pytest.mark.parametrize("backend", PROGRAMS)
def test_texts_are_tidy(backend: str) -> None:
    for rule in RULES:
        ((name, text),) = written(rulec.load(rule), backend, name="mine").items()
        assert name == "mine.py"
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert not [line for line in text.splitlines() if line != line.rstrip() or "\t" in line]
        assert "MIT License" in text
        body = ast.parse(text).body
        named = [x.name for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        named += [ast.unparse(x.targets[0]) for x in body if isinstance(x, ast.Assign)]
        assert len(named) == len(set(named)), "a name is defined twice"
        modules = {
            (node.names[0].name if isinstance(node, ast.Import) else str(node.module)).partition(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        own = {"numpy": {"numpy"}, "jax": {"jax"}, "triton": {"torch", "triton"}, "cupy": {"cupy", "numpy"}}[backend]
        assert modules <= own | {"math", "typing"}


def test_backends_that_nothing_is_written_for() -> None:
    with pytest.raises(RulecError, match="rulec build writes nothing for 'cpu'"):
        written(rulec.load("adamw"), "cpu")
    with pytest.raises(RulecError, match="did you mean 'triton'"):
        written(rulec.load("adamw"), "tritn")
    with pytest.raises(RulecError, match="--name '1a' is no name of a function"):
        written(rulec.load("adamw"), "c", name="1a")


@pytest.mark.skipif(bool(cuda_assembly.missing()), reason=cuda_assembly.missing())
@pytest.mark.parametrize("rule", ["adamw", "madgrad"])
def test_the_cuda_source_is_compiled_by_nvrtc(rule: str) -> None:
    ((_, text),) = written(rulec.load(rule), "cupy").items()
    (source,) = (
        node.value for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE"
    )  # fmt: skip
    assert len(cuda_assembly.compiled(ast.literal_eval(source), "sm_90")) > 1000
