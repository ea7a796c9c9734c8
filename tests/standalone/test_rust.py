"""Programs in Rust train with the C that `rulec build` writes, and their wrong calls are refused."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError
from rulec.standalone.prose import written
from rulec.tools.demo.digits import load
from tests.backends.kinds import ELEMENTWISE
from tests.standalone.c_library import CRule, CRun, address, drawn, storage_of
from tests.standalone.rust_program import RUSTC, Module, needs_rustc, program, run

Array = np.ndarray[Any, Any]

#: The network in `rust/network.rs`.
SHAPES = ((64, 24), (24,), (24, 10), (10,))
BATCH, STEPS, LR = 32, 200, 0.01

#: The rules of matrices and of vectors, with a setting of the program where the rule has more than steps.
NETWORKS = {
    "adamw": ("adamw", "adamw"), "lion": ("lion", "lion"), "lamb": ("lamb", "lamb"), "muon": ("muon", "adamw"),
    "normuon": ("normuon", "lion"), "adafactor": ("adafactor", "adafactor"), "sophia": ("sophia", "sophia"),
    "schedule_free": ("schedule_free_adamw", "schedule_free_adamw"),
}  # fmt: skip
SETTINGS = {"sophia": ("--cfg", "hessian"), "schedule_free": ("--cfg", "moves")}


def split(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    ends = np.cumsum([np.prod(s, dtype=int) for s in shapes])[:-1]
    return [x.reshape(s) for x, s in zip(np.split(flat, ends), shapes, strict=True)]


class Network:
    """A run of the network in Rust, and what it recorded."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.folder, self.dtype = folder, np.dtype(dtype)
        self.rules = [rulec.load(rule) for rule in NETWORKS[name]]
        digits, rng = load(), np.random.default_rng(0)
        chosen = np.concatenate([rng.permutation(len(digits.images)) for _ in range(9)])[: BATCH * STEPS]
        labels = digits.labels[chosen, None].astype(self.dtype)
        self.images, self.labels = digits.images[chosen].reshape(-1, 64).astype(self.dtype), labels
        self.initial = [rng.uniform(-1, 1, s) * np.sqrt(3 / s[0]) for s in SHAPES]
        self.initial = [x.astype(self.dtype) for x in self.initial]
        np.hstack([self.images, labels]).tofile(folder / "data.bin")
        np.concatenate([x.ravel() for x in self.initial]).tofile(folder / "initial.bin")
        modules = {n: Module(r, dtype) for n, r in zip(("matrices", "vectors"), self.rules, strict=True)}
        wide = ("--cfg", "wide") if dtype == "float64" else ()
        self.printed = run(folder, program(folder, "network.rs", modules, *SETTINGS.get(name, ()), *wide)).split()
        self.gradients = [split(g, SHAPES) for g in np.split(self.read("gradients"), STEPS)]

    def read(self, name: str) -> Array:
        return np.fromfile(self.folder / f"{name}.bin", self.dtype)

    def inputs(self, grads: Sequence[Array]) -> list[Array]:
        """The diagonals that the program gives to a rule with a Hessian."""
        return [g * g * self.dtype.type(BATCH) for g in grads]


@pytest.mark.slow
@needs_rustc
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_bits_of_c(name: str, tmp_path: Path) -> None:
    """The same gradients, given to the same C through ctypes."""
    network = Network(tmp_path, name, "float32")
    runs = []
    for number, rule in enumerate(network.rules):
        (tmp_path / str(number)).mkdir()
        chosen = network.initial[number::2]
        runs.append(CRun(CRule(rule, tmp_path / str(number)), chosen, {"lr": LR}))
    for grads in network.gradients:
        for number, c_run in enumerate(runs):
            step(c_run, grads[number::2], network if name == "sophia" else None)
    trained = split(network.read("trained"), SHAPES)
    for number, c_run in enumerate(runs):
        for ours, theirs, before in zip(trained[number::2], c_run.arrays, network.initial[number::2], strict=True):
            assert ours.tobytes() == theirs.tobytes()
            assert np.abs(ours - before).max() > 0.01
    steps, first, right = network.printed
    assert (int(steps), float(right) > 0.9) == (STEPS, True)
    assert abs(float(first) - np.log(10)) < 1
    if name == "schedule_free":
        check_moves(network, runs)


def step(c_run: CRun, grads: Sequence[Array], network: Network | None) -> None:
    """One step in C; of a rule with a Hessian where a network is given."""
    if network is None:
        c_run.step(grads, {"lr": LR})
        return
    for array, grad, diagonal, state in zip(c_run.arrays, grads, network.inputs(grads), c_run.states, strict=True):
        given = [address(np.ascontiguousarray(x)) for x in (array, grad, state)]
        size, hyper = c_run.rule.size(array.shape), c_run.rule.hyper({"lr": LR})
        assert c_run.rule.function("step")(*given, *size, address(diagonal), hyper) == 0


def check_moves(network: Network, runs: Sequence[CRun]) -> None:
    for word, name in (("to_evaluation", "evaluated"), ("to_training", "back")):
        left = split(network.read(name), SHAPES)
        for number, c_run in enumerate(runs):
            c_run.move(word, {"lr": LR})
            for ours, theirs in zip(left[number::2], c_run.arrays, strict=True):
                assert ours.tobytes() == theirs.tobytes()
    assert not np.allclose(network.read("evaluated"), network.read("trained"), rtol=1e-3)


@pytest.mark.slow
@needs_rustc
@pytest.mark.parametrize("name", ["adamw", "muon", "sophia"])
def test_a_network_in_float64_follows_the_reference(name: str, tmp_path: Path) -> None:
    network = Network(tmp_path, name, "float64")
    references = [
        ReferenceOptimizer(rule, network.initial[n::2], {"lr": LR}) for n, rule in enumerate(network.rules)
    ]  # fmt: skip
    for grads in network.gradients:
        for number, reference in enumerate(references):
            chosen = grads[number::2]
            inputs = {"hessian": network.inputs(chosen)} if name == "sophia" else {}
            reference.step(chosen, inputs=inputs)
    for number, reference in enumerate(references):
        for ours, theirs in zip(split(network.read("trained"), SHAPES)[number::2], reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)
    check_gradients(network)


def check_gradients(network: Network) -> None:
    """The first gradients are torch's."""
    w1, b1, w2, b2 = parameters = [torch.tensor(p, requires_grad=True) for p in network.initial]
    scores = torch.tanh(torch.tensor(network.images[:BATCH]) @ w1 + b1) @ w2 + b2
    labels = torch.tensor(network.labels[:BATCH, 0].astype(np.int64))
    torch.nn.functional.cross_entropy(scores, labels).backward()
    for ours, theirs in zip(network.gradients[0], parameters, strict=True):
        assert theirs.grad is not None
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-9, atol=1e-12)


# Gradients of segments


CELL = ((6, 6), (6,))


def whole(parameters: Sequence[torch.Tensor], first: torch.Tensor) -> list[Array]:
    """The gradients of all cells of `rust/segments.rs` at once, by torch."""
    w, b = (torch.tensor(p, requires_grad=True) for p in parameters)
    h = first
    for _ in range(8):
        h = torch.tanh(w @ h + b)
    (0.5 * ((h - 0.5) ** 2).sum()).backward()
    assert w.grad is not None
    assert b.grad is not None
    return [w.grad.numpy(), b.grad.numpy()]


@pytest.mark.slow
@needs_rustc
def test_gradients_of_segments_are_added_before_a_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    initial, first = [rng.standard_normal(s) * 0.5 for s in CELL], rng.standard_normal(6)
    np.concatenate([*(x.ravel() for x in initial), first]).tofile(tmp_path / "initial.bin")
    rules = [rulec.load(name) for name in ("muon", "adamw")]
    modules = {name: Module(rule, "float64") for name, rule in zip(("matrices", "vectors"), rules, strict=True)}
    assert run(tmp_path, program(tmp_path, "segments.rs", modules)).split() == ["5", "20"]
    references = [ReferenceOptimizer(rule, [x], {"lr": 0.02}) for rule, x in zip(rules, initial, strict=True)]
    recorded = np.split(np.fromfile(tmp_path / "gradients.bin"), 5)
    for sums in recorded:
        grads = whole([r.params[0] for r in references], torch.tensor(first))
        for reference, grad, ours in zip(references, grads, split(sums, CELL), strict=True):
            np.testing.assert_allclose(ours, grad, rtol=1e-7, atol=1e-9)
            reference.step([grad])
    merged, each = (split(np.fromfile(tmp_path / f"{name}.bin"), CELL) for name in ("merged", "each"))
    for ours, often, reference in zip(merged, each, references, strict=True):
        np.testing.assert_allclose(ours, reference.params[0], rtol=1e-7, atol=1e-9)
        assert np.abs(often - ours).max() > 0.01


# Wrong calls


HELD = "the length of {} is {}, and must be {}; nothing was written"
RANGES = (
    "lr at least 0; beta1 at least 0 and below 1; beta2 at least 0 and below 1; eps at least 0; weight_decay at least 0"
)
HYPER = "a hyper-parameter is outside its range"
STATE = "the state block was not initialised for a tensor of this shape; nothing was written"
MEMORY = "there is no memory for states, or for what a step works out on the way; nothing was written"
SHAPE = "the rule does not apply to a tensor of this shape (it applies where ndim == 2); nothing was written"

REFUSALS = [
    ("shape", HELD.format("param", 6, 8)), ("parameter of none", HELD.format("param", 0, 6)),
    ("short parameter", HELD.format("param", 5, 6)), ("short gradient", HELD.format("grad", 5, 6)),
    ("long gradient", HELD.format("grad", 7, 6)), ("empty gradient", HELD.format("grad", 0, 6)),
    ("state of another shape", HELD.format("param", 6, 7)), ("short hessian", HELD.format("hessian", 5, 6)),
    *[("begin", HYPER), ("rate", HYPER)] * 3, ("average", HYPER), ("move", HYPER),
    ("move back", HELD.format("param", 5, 6)), ("vector", SHAPE), ("number", SHAPE), ("overflow", MEMORY),
    ("empty, with columns", MEMORY), ("empty, at last", MEMORY), ("beyond memory", MEMORY),
    *[("one of none", HELD.format("param", 1, 0))] * 3, ("too few bytes", None), ("other bytes", STATE),
    ("too many steps", STATE), ("turned", STATE),
]  # fmt: skip


@pytest.mark.slow
@needs_rustc
def test_wrong_calls_are_refused_and_write_nothing(tmp_path: Path) -> None:
    names = ("adamw", "adafactor", "muon", "schedule_free_adamw", "sophia")
    modules = {name: Module(rulec.load(name)) for name in names}
    # With overflow checks, a sum that wraps is a panic.
    printed = run(tmp_path, program(tmp_path, "misuse.rs", modules, "-C", "overflow-checks=on")).splitlines()
    assert [line.partition(": ")[0] for line in printed] == [what for what, _ in REFUSALS]
    for line, (what, told) in zip(printed, REFUSALS, strict=True):
        if told == HYPER:
            assert line.startswith(f"{what}: {HYPER} (lr at least 0; "), line
            assert line.endswith("; nothing was written"), line
        elif told is not None:
            assert line == f"{what}: {told}"
    assert f"rate: {HYPER} ({RANGES}); nothing was written" in printed


# Other dtypes, and files of all rules


@pytest.mark.slow
@needs_rustc
def test_sixteen_bits_states_in_codes_and_weights_rounded_at_random(tmp_path: Path) -> None:
    storage = storage_of({"v": "dynamic8", "m": "int8"}, "stochastic")
    (param,), steps = drawn(4, ((1500,),), 3)
    bits = [
        (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (param, *(g[0] for g in steps))
    ]
    np.concatenate(bits).tofile(tmp_path / "given.bin")
    modules = {"rule": Module(rulec.load("adamw"), "bfloat16", storage)}
    run(tmp_path, program(tmp_path, "halves.rs", modules))
    c_rule = CRule(rulec.load("adamw"), tmp_path, "bfloat16", storage.words, weights="stochastic")
    array, hyper, size = bits[0].copy(), c_rule.hyper({"lr": 0.01}), c_rule.size((1500,))
    state = np.zeros(c_rule.function("state_bytes")(*size), np.uint8)
    words = [ctypes.c_int64(11), ctypes.c_int64(3)]
    assert c_rule.function("init")(address(state), address(array), *size, hyper, *words) == 0
    for grad in bits[1:]:
        assert c_rule.function("step")(address(array), address(grad), address(state), *size, hyper) == 0
    assert (tmp_path / "param.bin").read_bytes() == array.tobytes()
    # The first 8 bytes name the rule's files, which have another name here.
    assert (tmp_path / "state.bin").read_bytes()[8:] == state.tobytes()[8:]
    assert array.tobytes() != bits[0].tobytes()


AWKWARD = """
name: Awkward
applies_to: ndim == 2 and (rows > 1 or not tagged("head"))
hyper: {lr: 0.1, type: 1, Type: 2, fn: 3, match: 0.5, far: {default: .inf, min: 0}}
inputs: {loss: scalar, where: like p, self: like p}
state: {m: 0, ref: {init: 1, per: tensor}, use: {init: type, per: row}}
step: |
  m = type*m + g + where + self
  use = use + mean(g, per="row")
  ref = ref + fn*loss
  direction = m/Type + use*match + ref/(1 + far)
"""


@pytest.mark.slow
@needs_rustc
def test_modules_of_many_kinds_of_rules(tmp_path: Path) -> None:
    """All are compiled without a warning, in the editions of 2021 and 2024."""
    names = (*ELEMENTWISE, "novograd", "sm3", "muon", "transforms/identity")
    rules = {f"rule_{number}": rulec.load(name) for number, name in enumerate(names)}
    rules |= {"awkward": rulec.parse(AWKWARD), "Capital": rulec.load("lookahead(adafactor, k=2)")}
    for name, rule in rules.items():
        (tmp_path / f"{name}.rs").write_text(Module(rule).texts(name)[f"{name}.rs"])
    (tmp_path / "rules.rs").write_text("".join(f"pub mod {name};\n" for name in rules))
    words = ("-D", "warnings", "--crate-type", "lib", "--emit", "metadata", "rules.rs")
    for edition in ("2021", "2024"):
        run(tmp_path, "rustc", "--edition", edition, *words)
        assert (tmp_path / "librules.rmeta").stat().st_size > 0


DEFAULTS = """
mod rule;
fn main() {
    println!("{:?}", rule::Hyper::default());
}
"""


def compile_here(folder: Path) -> None:
    """The program `main` of the files rule.c, rule.rs and main.rs."""
    run(folder, "gcc", "-c", "rule.c")
    run(folder, *RUSTC, "-C", "link-arg=rule.o", "main.rs")


@needs_rustc
def test_defaults_are_those_of_the_rule(tmp_path: Path) -> None:
    rule = rulec.parse(AWKWARD)
    for name, text in Module(rule).texts("rule").items():
        (tmp_path / name).write_text(text)
    (tmp_path / "main.rs").write_text(DEFAULTS)
    compile_here(tmp_path)
    assert run(tmp_path, "./main") == (
        "Hyper { lr: 0.1, type_: 1.0, Type_: 2.0, fn_: 3.0, match_: 0.5, far: inf }\n"
    )  # fmt: skip


BEGIN = """
mod rule;
fn main() {
    let hyper = rule::Hyper::default();
    println!("{}", rule::State::new(&hyper, &[2, 3], &[0.5; 6]).unwrap_err());
}
"""


@needs_rustc
def test_a_c_file_of_another_rule_is_refused(tmp_path: Path) -> None:
    """Its functions have the same names."""
    for name, text in {**Module(rulec.load("nadam")).texts("rule"), "main.rs": BEGIN}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "rule.rs").write_text(Module(rulec.load("adamw")).texts("rule")["rule.rs"])
    compile_here(tmp_path)
    assert run(tmp_path, "./main") == "rule.c and rule.rs were not written together: write both anew\n"


def test_what_cannot_be_had() -> None:
    rule = rulec.load("adamw")
    with pytest.raises(RulecError, match="--bindings rust calls functions of C: choose --backend c, not jax"):
        written(rule, "jax", bindings=["rust"])
    with pytest.raises(RulecError, match=r"no --bindings 'rst'; did you mean 'rust'\?: choose among fortran, julia"):
        written(rule, "c", bindings=["rst"])
    with pytest.raises(RulecError, match="--name loop is a word of Rust: choose another for --bindings rust"):
        written(rule, "c", name="loop", bindings=["rust"])


def test_the_languages_of_modules_are_chosen() -> None:
    def endings(**more: Any) -> set[str]:
        texts: Mapping[str, str] = written(rulec.load("adamw"), "c", **more)
        return {name.partition(".")[2] for name in texts}

    assert endings() == {"c", "h", "f90", "jl"}
    assert endings(bindings=["rust"]) == {"c", "h", "rs"}
    assert endings(bindings=["julia", "rust"]) == {"c", "h", "jl", "rs"}
