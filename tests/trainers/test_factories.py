"""The optimizer factories of timm, torchtitan, PEFT, fastai and LightningCLI, and what they do to groups."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.errors import HyperError
from tests.trainers.launch import with_vision

pytestmark = pytest.mark.slow


def package(name: str) -> Any:
    """A package, or a skipped test."""
    return pytest.importorskip(name, reason=f"{name} is not installed: make trainers")


# timm


@pytest.fixture(scope="module")
def timm() -> Any:
    pytest.importorskip("fastcore", reason="timm is not installed: make trainers")
    with_vision.kept = with_vision()  # type: ignore[attr-defined]
    return package("timm")


def vision(timm: Any) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **size)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer_decay", [None, 0.75])
def test_groups_of_timm_are_those_of_its_own_optimizer(timm: Any, layer_decay: float | None) -> None:
    """Weight decay and the scales of layers, group by group, and the steps of timm's AdamW."""
    from timm.optim import create_optimizer_v2

    from rulec.integrations.timm import register_timm

    assert "rulec-adamw" in register_timm()
    models = [vision(timm) for _ in range(2)]
    keywords = {"lr": 1e-3, "weight_decay": 0.05, "layer_decay": layer_decay}
    ours, theirs = [
        create_optimizer_v2(m, opt=n, **keywords) for m, n in zip(models, ("rulec-adamw", "adamw"), strict=True)
    ]
    assert isinstance(ours, rulec.torch.AdamW)
    for key in ("weight_decay", "lr", "lr_scale"):
        assert [g.get(key) for g in ours.param_groups] == [g.get(key) for g in theirs.param_groups]
    images = torch.randn(4, 3, 16, 16)
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        for _ in range(3):
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*[m.parameters() for m in models], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_timm_finds_rules_by_names_of_ones_own(timm: Any) -> None:
    from timm.optim import create_optimizer_v2

    from rulec.integrations.timm import register_timm

    register_timm(clipped="clip_by_global_norm >> adamw")
    optimizer = create_optimizer_v2(vision(timm), opt="rulec-clipped", lr=1e-3, weight_decay=0.05, max_norm=1.0)
    assert type(optimizer).__name__ == "ClipByGlobalNormThenAdamW"
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.05}
    muon: Any = create_optimizer_v2(vision(timm), opt="lookahead_rulec-muon", lr=1e-3, weight_decay=0.05)
    assert {route.rule.name for route in muon._base_optimizer.routing()} == {"Muon", "AdamW"}
    with pytest.raises(HyperError, match="'my_rule' cannot be the name of a rule in timm"):
        register_timm(my_rule="lion")


# torchtitan


def words() -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32)]
    return nn.ModuleDict(dict(zip(["tok_embeddings", "first", "second", "output"], layers, strict=True)))


def word_steps(model: nn.ModuleDict, optimizers: Any, steps: int) -> None:
    tokens = torch.arange(32)
    for _ in range(steps):
        x = model["second"](model["first"](model["tok_embeddings"](tokens)).tanh()).tanh()
        nn.functional.cross_entropy(model["output"](x), tokens.flip(0)).backward()
        optimizers.step()
        optimizers.zero_grad()


def titan(name: str, implementation: str, model: nn.Module, **keywords: Any) -> Any:
    package("torchtitan")
    from torchtitan.components.optimizer import ParamGroupConfig

    from rulec.integrations.torchtitan import optimizers_container

    container = optimizers_container()
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={**keywords, "weight_decay": decay})
        for pattern, decay in ((r"bias$", 0.0), (".*", 0.1))
    ]
    return container(container.Config(param_groups=groups, implementation=implementation), model_parts=[model])


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop", "fused_opt_states_bf16"])
@pytest.mark.parametrize("name", ["muon", "lion", "clip_by_global_norm >> adamw"])
def test_flat_states_of_torchtitan_go_there_and_back(name: str, implementation: str) -> None:
    model = words()
    optimizers = titan(f"rulec:{name}", implementation, model, lr=0.01)
    word_steps(model, optimizers, 3)
    saved = copy.deepcopy(optimizers.state_dict())
    kind = torch.bfloat16 if implementation == "fused_opt_states_bf16" else torch.float32
    assert {v.dtype for k, v in saved.items() if k.startswith("state.") and not k.endswith(".step")} == {kind}
    assert {k.split(".")[1] for k in saved if k.startswith("state.")} == {*model}
    twin = words()
    twin.load_state_dict(model.state_dict())
    resumed = titan(f"rulec:{name}", implementation, twin, lr=0.5)
    resumed.load_state_dict(saved)
    word_steps(model, optimizers, 3)
    word_steps(twin, resumed, 3)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_first_state_of_torchtitan_moves_nothing() -> None:
    """`state_dict()` before the first step takes one with zero gradients and rates."""
    model = words()
    before = copy.deepcopy(model.state_dict())
    optimizers = titan("rulec:muon", "fused", model, lr=0.01)
    assert any(key.startswith("state.") for key in optimizers.state_dict())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_torchtitan_has_its_own_optimizers_beside_rules() -> None:
    model = words()
    optimizers = titan("AdamW", "foreach", model, lr=0.01)
    assert [type(each) for each in optimizers.optimizers] == [torch.optim.AdamW]
    with pytest.raises(NotImplementedError, match="Optimizer muon not added"):
        titan("muon", "foreach", model, lr=0.01)


# PEFT


@pytest.mark.parametrize("name", ["Lion", "AdamW", "Muon"])
def test_rates_of_lora_plus_are_those_of_the_groups(name: str) -> None:
    peft = package("peft")
    from peft.optimizers import create_loraplus_optimizer
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=1)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(GPT2LMHeadModel(config), lora)
    keywords = {"auto": True} if name == "Muon" else {}
    optimizer = create_loraplus_optimizer(
        model, getattr(rulec.torch, name), lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.01, **keywords
    )
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.01
    )
    for key in ("lr", "weight_decay"):
        assert [g[key] for g in optimizer.param_groups] == [g[key] for g in theirs.param_groups]
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for _ in range(2):  # B is zero at first, and so is the gradient of A
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters() if p.requires_grad)


# fastai


@pytest.mark.parametrize("name", ["AdamW", "Lion", "SOAP", "Muon"])
def test_hypers_of_fastai_are_those_of_the_groups(name: str) -> None:
    package("fastai")
    from fastai.optimizer import OptimWrapper

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    keywords = {"auto": True} if name == "Muon" else {}
    groups = [[*model[0].parameters(), *model[1].parameters()], [*model[2].parameters()]]
    wrapped = OptimWrapper(groups, getattr(rulec.torch, name), lr=1e-3, **keywords)
    wrapped.set_hyper("wd", 0.25)
    wrapped.set_hyper("lr", slice(1e-4, 1e-2))
    wrapped.set_hyper("mom", 0.5)
    inner = wrapped.opt.param_groups
    assert [group["weight_decay"] for group in inner] == [0.25, 0.25]
    assert [group["lr"] for group in inner] == pytest.approx([1e-4, 1e-2])
    wrapped.freeze_to(-1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # the first step of SOAP makes its bases
        model(torch.randn(5, 4)).square().mean().backward()
        wrapped.step()
        wrapped.zero_grad()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False] * 4 + [True] * 2
    again = OptimWrapper(groups, getattr(rulec.torch, name), lr=1e-3, **keywords)
    again.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert [group["weight_decay"] for group in again.opt.param_groups] == [0.25, 0.25]


# LightningCLI


@pytest.mark.parametrize(("path", "keywords", "kind"), [
    ("rulec.torch.Muon", {"lr": "0.02", "auto": "true", "adamw_lr": "0.003"}, "Muon"),
    ("rulec.torch.Lion", {"lr": "0.01", "betas": "[0.8, 0.9]", "weight_decay": "0.1"}, "Lion"),
    ("rulec.integrations.from_rule.from_rule", {"rule": "muon", "hyper": "{ns_steps: 3}"}, "Muon"),
    ("rulec.integrations.from_rule.from_rule", {"rule": "clip_by_global_norm >> adamw", "lr": "0.5"},
     "ClipByGlobalNormThenAdamW"),
])  # fmt: skip
def test_a_class_path_on_the_command_line(path: str, keywords: dict[str, str], kind: str, monkeypatch: Any) -> None:
    package("jsonargparse")
    import lightning.pytorch as lightning
    from lightning.pytorch.cli import LightningCLI

    class Net(lightning.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)

    arguments = ["fit", "--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
    arguments += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false", f"--optimizer={path}"]
    arguments += [f"--optimizer.{key}={value}" for key, value in keywords.items()]
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    optimizer: Any = LightningCLI(Net, save_config_callback=None).model.optimizers()
    inner = optimizer.optimizer
    assert type(inner).__name__ == kind
    group = inner.param_groups[0]
    wanted = {"lr": float(keywords["lr"])} if "lr" in keywords else {"ns_steps": 3}
    assert all(math.isclose(group[key], value) for key, value in wanted.items())
    if kind == "Muon":
        assert {route.rule.name for route in inner.routing()} == {"Muon", "AdamW"}
    if kind == "Lion":
        assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.1)
