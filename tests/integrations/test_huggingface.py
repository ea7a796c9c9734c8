"""Hugging Face's Trainer with rules: its groups, a run that is taken up again, and steps inside the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import HyperError
from rulec.integrations.huggingface import EagerSteps, TaggedGroups, optimizer_cls_and_kwargs

transformers: Any = pytest.importorskip("transformers")

KEYWORDS: Mapping[str, Mapping[str, Any]] = {
    "muon": {"lr": 0.02, "adamw_lr": 3e-3}, "lion": {"lr": 1e-3},
    "clip_by_global_norm >> adamw": {"lr": 0.01, "max_norm": 0.5},
}  # fmt: skip


class Tagged(TaggedGroups, transformers.Trainer):  # type: ignore[misc]
    """Groups with tags."""


class Eager(EagerSteps, transformers.Trainer):  # type: ignore[misc]
    """Steps inside the backward pass."""


def trainer(kind: Any, folder: Path, rule: str, **arguments: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    rows = torch.randint(0, 8, (32, 8), generator=torch.Generator().manual_seed(0))
    given = {
        "max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "weight_decay": 0.1, "logging_steps": 100, **arguments,
    }  # fmt: skip
    return kind(
        transformers.GPT2LMHeadModel(config), transformers.TrainingArguments(str(folder), **given),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(rule, **KEYWORDS[rule]),
    )  # fmt: skip


def weights(trained: Any) -> list[Tensor]:
    return [p.detach() for p in trained.model.parameters()]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def _trained(kind: Any, folder: Path, **arguments: Any) -> Any:
    """A trainer after its run, which draws the dropout that follows from the seed of its making."""
    made = trainer(kind, folder, "muon", save_strategy="no", **arguments)
    made.train()
    return made


def decays(trained: Any) -> dict[str, float]:
    """Name -> weight decay."""
    names = {id(param): name for name, param in trained.model.named_parameters()}
    return {names[id(p)]: g["weight_decay"] for g in trained.create_optimizer().param_groups for p in g["params"]}


@pytest.mark.parametrize("rule", KEYWORDS)
def test_what_decays_is_what_the_trainer_decays(rule: str, tmp_path: Path) -> None:
    plain, tagged = trainer(transformers.Trainer, tmp_path, rule), trainer(Tagged, tmp_path, rule)
    decaying = {*plain.get_decay_parameter_names(plain.model)}
    assert decays(plain) == {name: 0.1 * (name in decaying) for name, _ in plain.model.named_parameters()}
    assert decays(tagged) == decays(plain)


def test_the_trainer_alone_sends_the_same_parameters_to_muon_as_its_mixin(tmp_path: Path) -> None:
    """By shapes, and by the modules of the model."""
    plain, tagged = trainer(transformers.Trainer, tmp_path, "muon"), trainer(Tagged, tmp_path, "muon")
    names = {id(p): name for each in (plain, tagged) for name, p in each.model.named_parameters()}
    hidden = [
        {names[id(route.param)] for route in each.create_optimizer().routing() if route.rule.name == "Muon"}
        for each in (plain, tagged)
    ]
    # In a single block the extent of queries, keys and values together is that of no other matrix.
    assert hidden[1] - hidden[0] == {"transformer.h.0.attn.c_attn.weight"}
    assert hidden[0] < hidden[1]
    assert all("transformer.h." in name for name in hidden[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [transformers.Trainer, Tagged, Eager])
@pytest.mark.parametrize("rule", KEYWORDS)
def test_a_run_that_is_taken_up_again_has_the_same_bits(kind: Any, rule: str, tmp_path: Path) -> None:
    if kind is Eager and ">>" in rule:
        pytest.skip("a norm of all gradients is not known inside the backward pass")
    arguments = {"max_grad_norm": 0.0} if kind is Eager else {}
    whole = trainer(kind, tmp_path, rule, **arguments)
    whole.train()
    resumed = trainer(kind, tmp_path, rule, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert equal(whole, resumed)
    first = trainer(kind, tmp_path, rule, **arguments)
    assert not equal(whole, first)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    {}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {"bf16": True},
])  # fmt: skip
def test_steps_inside_the_backward_pass_have_the_same_bits(arguments: Mapping[str, Any], tmp_path: Path) -> None:
    late, early = [_trained(kind, tmp_path, max_grad_norm=0.0, **arguments) for kind in (Tagged, Eager)]
    assert equal(late, early)
    assert isinstance(early.optimizer.optimizer, rulec.torch.EagerUpdate)
    assert early.optimizer.optimizer.report().fired == len(weights(early))


def test_what_cannot_be_is_said_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(HyperError, match=r"max_grad_norm=1\.0 clips gradients after the backward pass"):
        trainer(Eager, tmp_path, "muon").create_optimizer()
    with pytest.raises(HyperError, match="the Trainer sets the weight decay of every group"):
        optimizer_cls_and_kwargs("lion", lr=1e-3, weight_decay=0.1)
    with pytest.raises(HyperError, match=r"Lion has no keyword 'beta1'"):
        optimizer_cls_and_kwargs("lion", lr=1e-3, beta1=0.9)
    bare = Tagged(trainer(Tagged, tmp_path, "lion").model, transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(HyperError, match="Tagged makes a rule's optimizer: give it optimizer_cls_and_kwargs"):
        bare.create_optimizer()
