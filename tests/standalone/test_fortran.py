"""A Fortran program trains on the digits with rules of `rulec build` chosen at run time, its layers updated in place.

The same network in torch, from the same numbers and in the same order, is what it must keep up with.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.standalone.prose import written
from rulec.tools.demo.digits import Digits, load

needs_gfortran = pytest.mark.skipif(shutil.which("gfortran") is None, reason="gfortran is not installed")

SOURCES = Path(__file__).parent / "fortran"
EPOCHS, BATCH, LR = 20, 32, 0.004

#: What the network must reach on the held-out digits, in Fortran and in torch.
BAR = 0.95

#: The parameters, by their shapes in Fortran: two for each of conv2d, conv1d, locally_connected1d and dense.
SHAPES = ((3, 3, 1, 8), (8,), (3, 8, 8), (8,), (3, 8, 4, 32), (4, 32), (128, 10), (10,))
FAN_IN = (9, 9, 24, 24, 24, 24, 128, 128)

Array = np.ndarray[Any, Any]


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def split(flat: Array) -> list[Array]:
    """Parameters from one file, as Fortran has them."""
    ends = np.cumsum([np.prod(s) for s in SHAPES])
    return [x.reshape(s, order="F") for x, s in zip(np.split(flat, ends[:-1]), SHAPES, strict=True)]


@dataclass(frozen=True)
class Trained:
    """What the Fortran program left, and what it was given."""

    digits: Digits
    order: Array
    initial: list[Array]
    gradients: list[Array]
    after_one: list[Array]
    final: list[Array]
    losses: Array
    accuracy: float


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program, `train`, for AdamW and Lion."""
    folder = tmp_path_factory.mktemp("fortran")
    for rule in ("adamw", "lion"):
        for name, text in written(rulec.load(rule), "c").items():
            (folder / name).write_text(text)
    for file in SOURCES.iterdir():
        shutil.copy(file, folder)
    strict = ("-O2", "-Wall", "-Wextra", "-Werror")
    run(folder, "gcc", "-std=c99", "-pedantic", *strict, "-c", "adamw.c", "lion.c", "recorder.c")
    run(folder, "gfortran", "-std=f2018", *strict, "-Wno-maybe-uninitialized", "-o", "train", "rulec_float32.f90",
        "adamw.f90", "lion.f90", "layers.f90", "train.f90", "adamw.o", "lion.o", "recorder.o",
        "-Wl,--wrap=adamw_step,--wrap=lion_step", "-lm")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def trained(program: Path) -> Trained:
    return train(program, "adamw", LR)


def train(folder: Path, rule: str, lr: float) -> Trained:
    """Trains with a rule."""
    digits = load()
    rng = np.random.default_rng(0)
    initial = [rng.uniform(-1, 1, s) * np.sqrt(3 / fan) for s, fan in zip(SHAPES, FAN_IN, strict=True)]
    initial = [x.astype(np.float32) for x in initial]
    samples = len(digits.images) // BATCH * BATCH
    order = np.array([rng.permutation(samples) for _ in range(EPOCHS)], np.int32)
    write_data(folder, digits, initial, order)
    run(folder, "./train", rule, str(lr))

    def numbers(name: str) -> list[Array]:
        return split(np.fromfile(folder / name, np.float32))

    return Trained(
        digits, order, initial, numbers("first_gradients.bin"), numbers("first_parameters.bin"),
        numbers("parameters.bin"), np.loadtxt(folder / "losses.txt"), float((folder / "accuracy.txt").read_text()),
    )  # fmt: skip


def write_data(folder: Path, digits: Digits, initial: Sequence[Array], order: Array) -> None:
    """The files that the program reads; labels and places count from 1 there."""
    sizes = (order.shape[1], len(digits.test_images), EPOCHS, BATCH)
    (folder / "sizes.txt").write_text(" ".join(map(str, sizes)))
    with (folder / "data.bin").open("wb") as file:
        for array in (digits.images[: sizes[0]], digits.labels[: sizes[0]].astype(np.int32) + 1, digits.test_images,
                      digits.test_labels.astype(np.int32) + 1, order + 1):  # fmt: skip
            file.write(np.ascontiguousarray(array).tobytes())
    with (folder / "initial.bin").open("wb") as file:
        for array in initial:
            file.write(array.tobytes(order="F"))


def scores(images: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same network in torch, over parameters of Fortran's shapes."""
    kernel, bias, kernel1, bias1, local, local_bias, weight, last = parameters
    x = images.reshape(-1, 1, 8, 8).transpose(2, 3)  # Fortran's first index is the one that varies fastest
    x = functional.conv2d(x, kernel.permute(3, 2, 0, 1), bias).relu()
    x = x.transpose(2, 3).reshape(-1, 8, 36)
    x = functional.conv1d(x, kernel1.permute(2, 1, 0), bias1).relu()
    x = (torch.einsum("bcmk,kcom->bom", x.unfold(2, 3, 1), local) + local_bias).relu()
    return x.reshape(-1, 128) @ weight + last


@pytest.mark.slow
@needs_gfortran
def test_the_gradients_are_torchs(trained: Trained) -> None:
    parameters = [torch.tensor(p, requires_grad=True) for p in trained.initial]
    chosen = trained.order[0][:BATCH]
    images, labels = trained.digits.images[chosen], trained.digits.labels[chosen]
    functional.cross_entropy(scores(torch.tensor(images), parameters), torch.tensor(labels)).backward()
    for ours, theirs in zip(trained.gradients, parameters, strict=True):
        assert theirs.grad is not None
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@needs_gfortran
def test_one_step_is_the_references(trained: Trained) -> None:
    reference = ReferenceOptimizer(rulec.load("adamw"), [p.astype(np.float64) for p in trained.initial], {"lr": LR})
    reference.step([g.astype(np.float64) for g in trained.gradients])
    for ours, theirs, before in zip(trained.after_one, reference.params, trained.initial, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=3e-8)
        assert not np.array_equal(ours, before)


@pytest.mark.slow
@needs_gfortran
def test_it_learns_as_well_as_in_torch(trained: Trained) -> None:
    parameters = [torch.tensor(p, requires_grad=True) for p in trained.initial]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=weight_decay())
    images, labels = torch.tensor(trained.digits.images), torch.tensor(trained.digits.labels)
    for epoch in trained.order:
        for chosen in np.split(epoch, len(epoch) // BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(scores(images[chosen], parameters), labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        found = scores(torch.tensor(trained.digits.test_images), parameters).argmax(1).numpy()
    theirs = float(np.mean(found == trained.digits.test_labels))
    assert theirs >= BAR
    assert trained.accuracy >= BAR
    assert abs(trained.accuracy - theirs) <= 0.03
    assert trained.losses[-1] < 0.1 * trained.losses[0]


def weight_decay() -> float:
    default = rulec.load("adamw").hyper["weight_decay"].default
    assert isinstance(default, float)
    return default


@pytest.mark.slow
@needs_gfortran
def test_the_program_says_what_it_trained(trained: Trained) -> None:
    """What it wrote as its parameters gives the accuracy that it counted itself."""
    with torch.no_grad():
        given = [torch.tensor(p) for p in trained.final]
        found = scores(torch.tensor(trained.digits.test_images), given).argmax(1).numpy()
    assert abs(float(np.mean(found == trained.digits.test_labels)) - trained.accuracy) < 0.5 / len(found)


@pytest.mark.slow
@needs_gfortran
def test_another_rule_is_chosen_by_its_name(program: Path) -> None:
    trained = train(program, "lion", LR / 10)
    reference = ReferenceOptimizer(rulec.load("lion"), [p.astype(np.float64) for p in trained.initial], {"lr": LR / 10})
    reference.step([g.astype(np.float64) for g in trained.gradients])
    for ours, theirs, before in zip(trained.after_one, reference.params, trained.initial, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=3e-8)
        assert not np.array_equal(ours, before)
    assert trained.accuracy >= BAR
