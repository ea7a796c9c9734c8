"""What every backend prints for twelve rules, for one also with noise as a gradient and with states in codes, and for
the products of matrices.

The texts are files, so a change of any kernel is seen in a change's diff.

`pytest tests/golden --refresh-golden` writes them anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rulec
from rulec.backend import registry
from rulec.compiler.layout import kernel_for, layout_for, scheduled
from rulec.errors import BackendUnsupported
from rulec.formats import of_key

SOURCES = Path(__file__).parent / "sources"

#: Rules with the dtypes of parameters and of states: one stage and several; scalars that are states; norms of tensors,
#: groups and the model; rows and columns; matrices; compositions; 16 bits.
RULES = {
    "sgd": ("float32", "float32"),
    "nesterov": ("bfloat16", "bfloat16"),
    "adamw": ("float32", "float32"),
    "lion": ("bfloat16", "float32"),
    "nadam": ("float64", "float64"),
    "rprop": ("float16", "float32"),
    "lamb": ("float32", "float32"),
    "adafactor": ("float32", "float32"),
    "muon": ("float32", "float32"),
    "prodigy": ("float32", "float32"),
    "schedule_free_adamw": ("float32", "float32"),
    "clip_by_global_norm >> lookahead(adamw)": ("float32", "float32"),
}
SUFFIXES = {"numpy": "py", "cpu": "py", "jax": "py", "mlx": "py", "triton": "py", "c": "c", "cupy": "cu"}


def printed(rule: str, backend: str) -> str | None:
    """The source; None where the backend refuses the rule."""
    param, state = RULES[rule]
    program = rulec.compile(rulec.load(rule))
    kernel = kernel_for(program, param, states=dict.fromkeys((b.name for b in program.states), state))
    try:
        return registry.get(backend).emit(*kernel)
    except BackendUnsupported:
        return None


#: The rule, dtype and values of the kernel with noise as its gradient, and the backends that have one.
ESTIMATE = ("adamw", "float32", "popcount")
ESTIMATING = ("cpu", "c", "cupy", "triton")


def estimated(backend: str) -> str:
    """The source of that kernel."""
    rule, param, values = ESTIMATE
    program = rulec.compile(rulec.load(rule))
    made: Any = registry.get(backend)
    found: str = made.emit_estimate(program, layout_for(program, param), values)
    return found


def kept_estimate(backend: str) -> Path:
    rule, _, values = ESTIMATE
    return SOURCES / backend / f"{rule}_by_{values}_noise.{SUFFIXES[backend]}"


#: The rule and the formats of its states of the kernel with states in codes, and the backends that have one.
CODED = ("adamw", {"m": "dynamic8/256-signed", "v": "dynamic4/128-unsigned-floor"})
DECODING = ("cpu", "c", "triton", "cupy")


def coded(backend: str) -> str:
    """The source of that kernel."""
    rule, formats = CODED
    program = rulec.compile(rulec.load(rule))
    layout = layout_for(program, "float32", formats={state: of_key(key) for state, key in formats.items()})
    return registry.get(backend).emit(*scheduled(program, layout))


def kept_coded(backend: str) -> Path:
    return SOURCES / backend / f"{CODED[0]}_in_codes.{SUFFIXES[backend]}"


#: The dtype of the matrices whose products are printed, and the backends that multiply them.
MULTIPLIED = "bfloat16"
MULTIPLYING = ("triton",)


def multiplied(backend: str) -> str:
    """The source of the products of `newton_schulz`."""
    made: Any = registry.get(backend)
    found: str = made.emit_quintic(MULTIPLIED)
    return found


def kept_products(backend: str) -> Path:
    return SOURCES / backend / f"newton_schulz_in_{MULTIPLIED}.{SUFFIXES[backend]}"


def kept(rule: str, backend: str) -> Path:
    name = rule.replace(" >> ", "_then_").replace("(", "_of_").replace(")", "")
    return SOURCES / backend / f"{name}.{SUFFIXES[backend]}"


@pytest.mark.parametrize("backend", SUFFIXES)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_are_those_that_were_kept(rule: str, backend: str, request: pytest.FixtureRequest) -> None:
    check_kept(kept(rule, backend), printed(rule, backend), backend, request)


@pytest.mark.parametrize("backend", ESTIMATING)
def test_kernels_that_make_noise_are_those_that_were_kept(backend: str, request: pytest.FixtureRequest) -> None:
    check_kept(kept_estimate(backend), estimated(backend), backend, request)


@pytest.mark.parametrize("backend", DECODING)
def test_kernels_with_states_in_codes_are_those_that_were_kept(
    backend: str, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    check_kept(kept_coded(backend), coded(backend), backend, request)


@pytest.mark.parametrize("backend", MULTIPLYING)
def test_products_of_matrices_are_those_that_were_kept(backend: str, request: pytest.FixtureRequest) -> None:
    check_kept(kept_products(backend), multiplied(backend), backend, request)


def check_kept(path: Path, text: str | None, backend: str, request: pytest.FixtureRequest) -> None:
    """Asserts that a source is what a file has, or writes it there."""
    if request.config.getoption("--refresh-golden"):
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    before = path.read_text(encoding="utf-8") if path.exists() else None
    assert text == before, f"{path.name} of {backend} has changed: look at it, and run pytest with --refresh-golden"


def test_nothing_else_is_kept_and_every_backend_is() -> None:
    assert set(SUFFIXES) == set(registry.names())
    files = {p for p in SOURCES.rglob("*") if p.is_file()}
    rules = {kept(rule, backend) for rule in RULES for backend in SUFFIXES}
    coded_files = {kept_coded(backend) for backend in DECODING}
    others = coded_files | {kept_products(backend) for backend in MULTIPLYING}
    assert files <= rules | {kept_estimate(backend) for backend in ESTIMATING} | others
    assert {p.parent.name for p in files} == set(SUFFIXES)
