"""Words of namesakes in parameter groups of torch's classes: as if the group had an optimizer of its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import HyperError, TensorError
from tests.torch.twins import give_gradients, parameters

#: A class of torch's -> the words of one group.
WORDS: list[tuple[str, dict[str, Any]]] = [
    ("Muon", {"ns_form": "gram"}), ("Muon", {"algo": "adamuon"}), ("AdamW", {"caution": True}),
    ("AdamW", {"corrected_weight_decay": True, "weight_decay": 0.3}),
    ("Adamax", {"weight_decay": 0.1, "weight_decouple": True}),
    ("SGD", {"weight_decay": 0.1, "weight_decouple": True}), ("RMSprop", {"weight_decay": 0.1, "fixed_decay": True}),
]  # fmt: skip

SHAPES = ((8, 24), (8, 24))

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """No word is warned of as one that nobody reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def steps(optimizers: Sequence[Any], params: Sequence[Tensor], numbers: Sequence[int]) -> None:
    for number in numbers:
        give_gradients(params, number)
        for optimizer in optimizers:
            optimizer.step()


def kind_of(name: str) -> Any:
    return getattr(rulec.torch, name)


@pytest.mark.parametrize(("name", "words"), WORDS)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "added later"])
def test_a_group_has_its_words_for_itself(late: bool, name: str, words: dict[str, Any]) -> None:
    together, alone = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    kind, group = kind_of(name), {"params": together[1:], **words}
    optimizer = kind([{"params": together[:1]}, *([] if late else [group])], lr=0.05)
    if late:
        optimizer.add_param_group(group)
    steps([optimizer], together, range(3))
    steps([kind(alone[:1], lr=0.05), kind(alone[1:], lr=0.05, **words)], alone, range(3))
    assert all(map(torch.equal, together, alone))
    plain = parameters(shapes=SHAPES)
    steps([kind(plain, lr=0.05)], plain, range(3))
    assert [*map(torch.equal, together, plain)] == [True, False]


@pytest.mark.parametrize(("name", "words"), WORDS)
def test_an_iterator_of_groups_has_them_too(name: str, words: dict[str, Any]) -> None:
    groups = [{"params": [p], **words} for p in parameters(shapes=SHAPES)]
    optimizer = kind_of(name)(iter(groups), lr=0.05)
    assert [{key: group[key] for key in words} for group in optimizer.param_groups] == [words] * 2


@pytest.mark.parametrize(("name", "words"), WORDS)
def test_a_checkpoint_and_a_copy_go_on_with_them(name: str, words: dict[str, Any]) -> None:
    first = parameters(shapes=SHAPES)
    optimizer = kind_of(name)([{"params": first[:1]}, {"params": first[1:], **words}], lr=0.05)
    steps([optimizer], first, range(2))
    copied = copy.deepcopy(optimizer)
    second = [p for group in copied.param_groups for p in group["params"]]
    third = [nn.Parameter(p.detach().clone()) for p in first]
    loaded = kind_of(name)([{"params": [p]} for p in third], lr=0.05)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, params in ((optimizer, first), (copied, second), (loaded, third)):
        steps([each], params, range(2, 4))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))


@pytest.mark.parametrize(
    ("name", "words"), [("Muon", {"algo": "adamw"}), ("SGD", {"weight_decouple": True, "momentum": -1})]
)
def test_a_group_that_is_refused_leaves_no_word_behind(name: str, words: dict[str, Any]) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = kind_of(name)(params[:1], lr=0.05)
    before = optimizer.interface, {**optimizer.defaults}, {**optimizer.param_groups[0]}
    with pytest.raises(HyperError):
        optimizer.add_param_group({"params": params[1:], **words})
    assert before == (optimizer.interface, optimizer.defaults, *optimizer.param_groups)


@pytest.mark.parametrize("form", ["gram", None])
def test_the_form_of_iterations_routes_no_vector_to_another_rule(form: str | None) -> None:
    with pytest.raises(TensorError, match=r"^Muon does not apply to parameter 0, of shape \(5,\): leave it out"):
        rulec.torch.Muon(parameters(shapes=[(5,)]), ns_form=form)


# Partitions


def named() -> list[tuple[str, Tensor]]:
    return [*zip(("w", "b"), parameters(shapes=[(8, 24), (5,)]), strict=True)]


@pytest.mark.parametrize("words", [{"ns_form": "gram"}, {"algo": "adamuon"}])
@pytest.mark.parametrize("place", ["keyword", "part", "eager"])
def test_partitions_take_them(place: str, words: dict[str, Any]) -> None:
    pairs, alone = named(), parameters(shapes=[(8, 24)])
    params = [p for _, p in pairs]
    partition = rulec.partition({"w": ("muon", words) if place == "part" else "muon", "*": "adamw"})
    if place == "eager":
        eager = rulec.torch.EagerUpdate(pairs, partition, lr=0.05, **words)
        for number in range(3):
            give_gradients(params, number)
            grads = [p.grad for p in params]
            eager.zero_grad()
            with eager.backward():
                torch.autograd.backward([(p * g).sum() for p, g in zip(params, grads, strict=True)])
            eager.step()
    else:
        keywords = {} if place == "part" else words
        steps([rulec.torch.Partitioned(partition, pairs, lr=0.05, **keywords)], params, range(3))
    steps([rulec.torch.Muon(alone, lr=0.05, **words)], alone, range(3))
    assert torch.equal(params[0], alone[0])


def test_a_part_that_is_added_later_has_them() -> None:
    partition = rulec.partition({"b": "adamw", "w": "muon"}, allow_unused=True)
    (w, b), alone = named(), parameters(shapes=[(8, 24)])
    optimizer = rulec.torch.Partitioned(partition, [b], lr=0.05)
    optimizer.add_param_group({"params": [w], "ns_form": "gram"})
    steps([optimizer], [w[1], b[1]], range(3))
    steps([rulec.torch.Muon(alone, lr=0.05, ns_form="gram")], alone, range(3))
    assert torch.equal(w[1], alone[0])
    groups = rulec.torch.partitioned_groups(rulec.partition({"w": ("muon", {"algo": "adamuon"})}), [named()[0]])
    assert rulec.torch.Muon(groups).param_groups[0]["algo"] == "adamuon"
