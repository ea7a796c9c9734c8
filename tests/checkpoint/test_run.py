"""What an adapter needs is the four methods of `Run`; what is refused, and in which words, is the same for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.torch
from rulec import checkpoint
from rulec.checkpoint import Leaf, Shared, Stored
from rulec.checkpoint.tensors import read_file, write_file
from rulec.errors import StateMismatch
from tests.checkpoint.runs import TorchRun, difference, first_parameters
from tests.checkpoint.test_all_or_nothing import OF_GROUPS, OF_MODEL, RUNS


@dataclass
class PlainRun:
    """A framework of nothing but NumPy's arrays and numbers, by the rule named."""

    rule: str
    seed: int = 0
    steps: int = 0
    params: dict[str, Any] = field(default_factory=first_parameters)
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)

    def leaves(self) -> list[Leaf]:
        rule = rulec.load(self.rule)
        return [Leaf(n, p.shape, p.dtype.name, rule, i) for i, (n, p) in enumerate(self.params.items())]

    def states(self, place: int) -> tuple[int, Mapping[str, Stored]]:
        states = [*self.held.values()][place] if self.held else {}
        return self.steps, {name: Stored.of(array) for name, array in states.items()}

    def value(self, place: int) -> Stored:
        return Stored.of([*self.params.values()][place])

    def shared(self) -> Shared:
        return Shared([{"lr": 0.01}], self.numbers, [self.steps], self.steps)


def test_four_methods_are_enough(tmp_path: Path) -> None:
    """Two steps of torch's own AdamW, saved by them, go on in ours to torch's fourth step."""
    file, run = tmp_path / "run.safetensors", PlainRun("adamw", steps=2)
    oracle = TorchRun(torch.optim.AdamW, "float64", lr=0.01).steps(range(2))
    run.params = {name: array.copy() for name, array in oracle.now().items()}
    for name, param in oracle.params.items():
        theirs = oracle.optimizer.state[param]
        run.held[name] = {"m": theirs["exp_avg"].numpy(), "v": theirs["exp_avg_sq"].numpy()}
    checkpoint.save(run, file, parameters=True)
    ours = TorchRun(rulec.torch.AdamW, "float64", lr=0.01).load(file).steps(range(2, 4))
    assert difference(ours.now(), oracle.steps(range(2, 4)).now()) <= 1e-15
    ours.save(file)
    loaded = checkpoint.load(run, file, 1, parameters=True)
    assert [p.steps for p in loaded.parameters] == [4, 4]
    assert np.array_equal(loaded.values[1].values, ours.now()["kernel"])


def without(file: Path, key: str) -> None:
    """The file without one of its arrays, its checksum right."""
    tensors, metadata = read_file(file)
    tensors = {name: Stored(t.dtype, t.shape, t.data.copy()) for name, t in tensors.items() if name != key}
    write_file(file, tensors, {name: text for name, text in metadata.items() if name != "checksum"})


LACKING = (
    ("adamw", "state/kernel/v", "has no v of kernel (it has m): it is of another rule"),
    (OF_GROUPS, "group/lr_max", "has no lr_max, which is kept per group: it is of another rule"),
    (OF_MODEL, "model/d", "has no d, which is kept per model: it is of another rule"),
)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(("rule", "key", "sentence"), LACKING)
def test_what_a_file_lacks_is_said_in_the_same_words(
    kind: Any, rule: str, key: str, sentence: str, tmp_path: Path
) -> None:
    file, run = tmp_path / "run.safetensors", kind(rule).steps(range(1))
    run.save(file)
    without(file, key)
    before = run.everything()
    with pytest.raises(StateMismatch) as refused:
        run.load(file)
    assert str(refused.value) == f"{file} {sentence}"
    assert run.everything() == before


def test_two_parameters_of_one_name_are_not_loaded(tmp_path: Path) -> None:
    """A point in torch's names is a slash in a file's."""
    file, weight = tmp_path / "run.safetensors", torch.nn.Parameter(torch.ones(2))
    rulec.torch.save(rulec.torch.SGD([("a.b", weight)]), file)
    both = rulec.torch.SGD([("a.b", weight), ("a/b", torch.nn.Parameter(torch.ones(2)))])
    with pytest.raises(StateMismatch, match=r"^two parameters are called a/b: give each a name of its own$"):
        rulec.torch.load(both, file)
    assert json.loads(read_file(file)[1]["parameters"])[0]["name"] == "a/b"
