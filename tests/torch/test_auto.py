"""Matrix rules without groups of tags: each parameter is tagged by its name, or by the shapes of all."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.errors import HyperError, TensorError
from rulec.torch.classes import class_named, class_names

MATRIX = ("AdaGO", "AdaMuon", "Dion", "Dion2", "Muon", "NorDion2", "NorMuon", "PolarGrad", "SPEL")


class Residual(nn.Module):
    """Convolutions in two widths, as in a small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer1, self.down, self.layer2 = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.layer2(self.down(self.layer1(x).relu()).relu()).mean((2, 3)))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """A vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)


def published(kind: str, **config: Any) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    configured = getattr(transformers, f"{kind}Config")(**config)
    model = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForSequenceClassification"}[kind]
    return getattr(transformers, model)(configured)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Any, set[str]]] = {
    "resnet": (Residual, {"conv1", "fc"}),
    "vit": (Vision, {"patch_embed", "cls_token", "pos_embed", "head"}),
    "gpt2": (
        lambda: published("GPT2", n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=24, bos_token_id=1,
                          eos_token_id=1),
        {"transformer.wte", "transformer.wpe"},
    ),
    "llama": (
        lambda: published("Llama", num_hidden_layers=2, hidden_size=16, intermediate_size=40, num_attention_heads=4,
                          num_key_value_heads=2, vocab_size=50),
        {"model.embed_tokens", "lm_head"},
    ),
    "narrow": (
        lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 50)),
        {"0", "3"},
    ),
    "value": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)), {"0", "2"},
    ),
    "autoencoder": (
        lambda: nn.Sequential(nn.Linear(30, 16), nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 30)), {"0", "3"},
    ),
    "bert": (
        lambda: published("Bert", num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=4,
                          vocab_size=50),
        {"bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings",
         "bert.embeddings.token_type_embeddings", "classifier"},
    ),
}  # fmt: skip


def others(model: nn.Module, optimizer: Any) -> set[str]:
    """The layers with a parameter of two dimensions or more that the class's own rule does not update."""
    names = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    routes = zip(names, optimizer.routing(), strict=True)
    return {name for name, route in routes if route.param.dim() >= 2 and route.rule.name == "AdamW"}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_and_output_layers_of_models_are_known(name: str, named: bool) -> None:
    make, wanted = MODELS[name]
    model = make()
    optimizer = rulec.torch.Muon(model.named_parameters() if named else model.parameters(), auto=True)
    assert others(model, optimizer) == wanted
    assert all(route.rule.name == "AdamW" for route in optimizer.routing() if route.param.dim() < 2)
    assert len(optimizer.param_groups) == 1


def test_every_rule_that_asks_for_tags_can_find_them_itself() -> None:
    asking = {name for name in class_names() if "auto" in class_named(name).interface.signature.parameters}
    assert asking >= {*MATRIX}
    assert asking == {name for name in class_names() if "tags" in class_named(name).interface.fixed}


@pytest.mark.parametrize("name", MATRIX)
def test_a_rule_with_tags_of_its_own_trains_as_with_tagged_groups(name: str) -> None:
    """The same bits, for a model that both tag alike."""
    layers = {"embed": nn.Embedding(11, 8), "hidden": nn.Linear(8, 8), "act": nn.Tanh(), "head": nn.Linear(8, 5)}
    model = nn.Sequential(OrderedDict(layers))
    models = [model, copy.deepcopy(model)]
    kind = getattr(rulec.torch, name)
    optimizers = [kind(models[0].named_parameters(), auto=True), kind(rulec.torch.tagged_groups(models[1]))]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.arange(11).roll(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*[model.parameters() for model in models], strict=True):
        assert torch.equal(one, other)


def trained(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reloaded(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """A copy of the model, and another optimizer over it, from a saved state."""
    twin = copy.deepcopy(model)
    other = rulec.torch.Muon(twin.parameters(), lr=0.1, auto=True)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))  # noqa: S301
    return twin, other


WAYS: dict[str, Any] = {
    "state_dict": reloaded, "copy": lambda *both: copy.deepcopy(both),
    "pickle": lambda *both: pickle.loads(pickle.dumps(both)),  # noqa: S301
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_tags_that_were_found_go_where_the_optimizer_goes(way: str) -> None:
    model = Residual()
    optimizer = rulec.torch.Muon(model.parameters(), lr=0.1, auto=True)
    trained(model, optimizer, 2)
    twin, other = WAYS[way](model, optimizer)
    trained(model, optimizer, 2)
    trained(twin, other, 2)
    assert [route.tags for route in other.routing()] == [route.tags for route in optimizer.routing()]
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_saved_state_tells_tags_to_an_optimizer_that_would_find_others() -> None:
    """Saved with names, loaded without: the states belong to the rules that they were made by."""
    layers = {"embed": nn.Embedding(8, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 5)}
    model = nn.Sequential(OrderedDict(layers))
    named, bare = rulec.torch.Muon(model.named_parameters(), auto=True), rulec.torch.Muon(model.parameters(), auto=True)
    assert [r.routed for r in named.routing()] == [True, False, True, True, True]
    assert [r.routed for r in bare.routing()] == [False, False, True, True, True]
    for optimizer in (named, bare):
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        bare.load_state_dict(named.state_dict())
    assert [r.routed for r in bare.routing()] == [r.routed for r in named.routing()]
    assert set(bare.state[model.get_parameter("embed.weight")]) == {"step", "m", "v"}


def test_a_saved_state_without_tags_leaves_those_that_were_found() -> None:
    """As torch's Muon saves it, or another library."""
    params = [*Vision().parameters()]
    optimizer = rulec.torch.Muon(params, lr=0.5, auto=True)
    routed = [route.routed for route in optimizer.routing()]
    file = rulec.torch.Muon(params, lr=0.1, auto=True).state_dict()
    for key in ("tags", "param_tags", "auto"):
        del file["param_groups"][0][key]
    optimizer.load_state_dict(file)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert [route.routed for route in optimizer.routing()] == routed


def test_groups_keep_their_number_and_tags_given_by_hand() -> None:
    model = Residual()
    groups: list[dict[str, Any]] = [
        {"params": [model.conv1.weight], "tags": []}, {"params": [model.layer1.weight, model.layer2.weight]},
        {"params": [model.fc.weight, model.fc.bias]},
    ]  # fmt: skip
    optimizer = rulec.torch.NorMuon(groups, auto=True)
    assert [route.rule.name for route in optimizer.routing()] == ["NorMuon", "NorMuon", "NorMuon", "AdamW", "AdamW"]
    optimizer.add_param_group({"params": [model.down.weight, *model.bn1.parameters()]})
    assert [route.rule.name for route in optimizer.routing()][5:] == ["NorMuon", "AdamW", "AdamW"]
    # What was found stays, whatever comes: the last matrix is another one now.
    assert [route.rule.name for route in optimizer.routing()][3] == "AdamW"
    trained(model, optimizer, 2)


def test_parameters_that_are_put_into_a_group_get_tags() -> None:
    model = Residual()
    optimizer = rulec.torch.Muon([model.layer1.weight, model.layer2.weight, model.fc.weight], auto=True)
    optimizer.param_groups[0]["params"].append(model.fc.bias)
    trained(model, optimizer, 1)
    assert [route.rule.name for route in optimizer.routing()] == ["AdamW", "Muon", "AdamW", "AdamW"]


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_a_kernel_is_the_matrix_of_its_first_extent_and_the_rest(name: str) -> None:
    """By torch's Muon on the flattened kernel, up to rounding in float32, and to the bit by this one."""
    weight, grads = torch.randn(8, 4, 3, 3), torch.randn(3, 8, 4, 3, 3)
    kernel, ours, theirs = (nn.Parameter(x.clone()) for x in (weight, weight.flatten(1), weight.flatten(1)))
    kind = getattr(rulec.torch, name)
    optimizers = [kind([{"params": [kernel], "tags": ["kernel"]}], lr=0.1), kind([ours], lr=0.1)]
    optimizers += [torch.optim.Muon([theirs], lr=0.1)] if name == "Muon" else []
    for grad in grads:
        kernel.grad, ours.grad, theirs.grad = grad.clone(), grad.flatten(1).clone(), grad.flatten(1).clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(kernel.flatten(1), ours)
    if name == "Muon":
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


def test_a_model_without_a_hidden_matrix_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"Muon\(auto=True\) knows no hidden matrix .* AdamW updates all of them"):
        rulec.torch.Muon(nn.Linear(8, 3).parameters(), auto=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rulec.torch.Muon(Vision().parameters(), auto=True)


def test_without_auto_nothing_is_tagged() -> None:
    with pytest.raises(TensorError, match="Muon does not apply to parameter 0, of shape"):
        rulec.torch.Muon(Residual().parameters())
    with pytest.raises(HyperError, match="Lion has no keyword 'auto'"):
        rulec.torch.Lion(Residual().parameters(), auto=True)
    with pytest.raises(HyperError, match="param_tags of a group has 1 entries for 2 parameters"):
        rulec.torch.Muon([{"params": [*nn.Linear(3, 3).parameters()], "tags": [], "param_tags": [["head"]]}])
