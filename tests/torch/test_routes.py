"""Tags, and which rule each parameter goes to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rulec
import rulec.torch
from rulec.errors import HyperError, RuleError, TensorError
from tests.torch.test_rules import advance, through_a_file
from tests.torch.twins import difference, give_gradients, parameters


class Tiny(nn.Module):
    """A language model's parts, its output layer tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.classifier = nn.Linear(6, 3)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.tokens(x) + self.pos_embed
        seen = self.norm(seen + self.attention(seen, seen, seen)[0])
        made: torch.Tensor = self.lm_head(seen + self.hidden(seen)).sum() + self.classifier(seen).square().sum()
        return made


def test_the_tags_of_a_model() -> None:
    model = Tiny()
    found = {name: group["tags"] for group in rulec.torch.tagged_groups(model) for name, _ in group["params"]}
    assert found == {
        "pos_embed": ("embedding",),
        "tokens.weight": ("embedding", "head"),
        "attention.in_proj_weight": (),
        "attention.in_proj_bias": ("bias",),
        "attention.out_proj.weight": (),
        "attention.out_proj.bias": ("bias",),
        "norm.weight": ("norm",),
        "norm.bias": ("norm", "bias"),
        "hidden.0.weight": (),
        "hidden.0.bias": ("bias",),
        "hidden.2.weight": (),
        "hidden.2.bias": ("bias",),
        "classifier.weight": ("head",),
        "classifier.bias": ("head", "bias"),
    }
    assert sum(len(group["params"]) for group in rulec.torch.tagged_groups(model)) == len([*model.parameters()])


def test_a_tag_may_have_options_and_names_may_have_tags() -> None:
    groups = rulec.torch.tagged_groups(
        Tiny(), {"embedding": "hidden.2.*", "input": ["tokens.*", "pos*"]}, bias={"weight_decay": 0.0},
        embedding={"lr": 0.5, "weight_decay": 0.1}, input={"lr": 0.25},
    )  # fmt: skip
    by_tags = {group["tags"]: group for group in groups}
    assert by_tags[("bias",)]["weight_decay"] == 0.0
    assert by_tags[("embedding", "bias")]["weight_decay"] == 0.1
    assert by_tags[("embedding", "head", "input")]["lr"] == 0.25
    with pytest.raises(
        HyperError, match="'nrom' is none of the tags embedding, head, norm, bias, vector; did you mean 'norm'"
    ):
        rulec.torch.tagged_groups(Tiny(), nrom={"lr": 0.1})
    with pytest.raises(HyperError, match=r"embedding= takes options of a group.*not list: .*names=\{'embedding'"):
        rulec.torch.tagged_groups(Tiny(), embedding=["tokens.weight"])  # type: ignore[arg-type]
    rulec.torch.AdamW(groups)


def test_muon_of_a_model() -> None:
    model = Tiny()
    optimizer = rulec.torch.Muon(rulec.torch.tagged_groups(model), lr=0.02, adamw_lr=0.003)
    routing = optimizer.routing()
    muon = {route.name for route in routing if route.rule.name == "Muon"}
    assert muon >= {"attention.in_proj_weight", "attention.out_proj.weight", "hidden.0.weight", "hidden.2.weight"}
    assert muon.isdisjoint({"tokens.weight", "pos_embed", "norm.weight", "hidden.0.bias"})
    lines = str(routing).splitlines()
    assert "tokens.weight              (11, 6)    AdamW" in lines
    assert "hidden.0.weight            (12, 6)    Muon" in lines
    model(torch.tensor([[1, 2, 3, 4, 5]])).backward()
    optimizer.step()
    assert set(optimizer.state[model.hidden[0].weight]) == {"momentum_buffer"}
    assert set(optimizer.state[model.tokens.weight]) == {"step", "m", "v"}


def test_each_rule_gets_its_own_hyper_parameters() -> None:
    sides = [parameters(torch.float64, [(6, 4), (5,), (4, 8)]) for _ in range(2)]
    groups = [{"params": sides[0][:2], "tags": []}, {"params": sides[0][2:], "tags": ["embedding"]}]
    keywords = {"adamw_lr": 0.01, "betas": (0.8, 0.95), "adamw_eps": 1e-6}
    ours = rulec.torch.Muon(groups, lr=0.05, weight_decay=0.2, **keywords)
    matrix, *others = sides[1]
    theirs = [
        torch.optim.Muon([matrix], lr=0.05, weight_decay=0.2),
        torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, foreach=False),
    ]
    advance(ours, sides[0], range(10))
    advance(theirs[0], sides[1], range(10))
    advance(theirs[1], sides[1], range(10))
    assert difference(*sides) * torch.finfo(torch.float64).eps < 1e-12


def test_clipping_is_one_norm_over_both_rules() -> None:
    """Against torch's clipping of all gradients, its Muon of the matrix and its AdamW of the others."""
    kind = rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("muon"))
    sides = [parameters(torch.float64, [(6, 4), (5,), (4, 8)]) for _ in range(2)]
    groups = [{"params": sides[0][:2]}, {"params": sides[0][2:], "tags": ["head"]}]
    ours = kind(groups, max_norm=0.5, lr=0.05, weight_decay=0.2, adamw_lr=0.01)
    matrix, *others = sides[1]
    theirs = [
        torch.optim.Muon([matrix], lr=0.05, weight_decay=0.2),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.2, foreach=False),
    ]
    for number in range(10):
        give_gradients(sides[0], number)
        give_gradients(sides[1], number)
        torch.nn.utils.clip_grad_norm_(sides[1], 0.5)
        for optimizer in [ours, *theirs]:
            optimizer.step()
    assert difference(*sides) * torch.finfo(torch.float64).eps < 1e-12
    assert [route.routed for route in ours.routing()] == [False, True, True]


def test_the_rate_of_the_rest_may_follow_a_schedule() -> None:
    kind = rulec.torch.optimizer(rulec.load("muon").bind(adamw_lr="0.1*lr"))
    params = [torch.nn.Parameter(torch.zeros(3))]
    optimizer = kind([{"params": params}], lr=0.5, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        params[0].grad = torch.ones(3)
        optimizer.step()
        schedule.step()
    assert params[0].tolist() == pytest.approx([-0.05 - 0.005] * 3, rel=1e-5)


def test_muon_refuses_what_that_of_torch_refuses() -> None:
    with pytest.raises(TensorError, match=r"Muon does not apply to bias, of shape \(2,\): leave it out"):
        rulec.torch.Muon(nn.Linear(3, 2).named_parameters())
    optimizer = rulec.torch.Muon([nn.Linear(3, 2).weight])
    with pytest.raises(TensorError, match="give its group tags"):
        optimizer.add_param_group({"params": [torch.zeros(3)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [torch.zeros(3)], "tags": ["bias"]})


def test_tags_are_words() -> None:
    for tags in ("embedding", 3, [3], [["bias"]]):
        with pytest.raises(HyperError, match=r"tags=.* of a group must be a list of words"):
            rulec.torch.Muon([{"params": [torch.zeros(3, 3)], "tags": tags}])


def test_tags_are_in_the_checkpoint_and_stay_where_it_has_none() -> None:
    params = parameters(shapes=[(4, 6), (5, 4)])
    groups = [{"params": params[:1], "tags": ["embedding"]}, {"params": params[1:]}]
    optimizer = rulec.torch.Muon(groups)
    advance(optimizer, params, range(2))
    saved = through_a_file(optimizer.state_dict())
    assert [group["tags"] for group in saved["param_groups"]] == [("embedding",), None]
    again = rulec.torch.Muon([{"params": [p]} for p in parameters(shapes=[(4, 6), (5, 4)])])
    again.load_state_dict(saved)
    assert [route.routed for route in again.routing()] == [True, False]
    torch_only = torch.optim.Muon([torch.nn.Parameter(p.detach().clone()) for p in params[1:]])
    advance(torch_only, torch_only.param_groups[0]["params"], range(1))
    one = rulec.torch.Muon([{"params": params[1:], "tags": ["norm"]}])
    one.load_state_dict(torch_only.state_dict())
    assert one.param_groups[0]["tags"] == ("norm",)


def test_tags_that_change_on_the_way_are_followed() -> None:
    params = parameters(shapes=[(4, 6)])
    optimizer = rulec.torch.Muon(params)
    advance(optimizer, params, range(1))
    optimizer.param_groups[0]["tags"] = ["embedding"]
    advance(optimizer, params, range(1, 2))
    assert {"m", "v", "step"} <= set(optimizer.state[params[0]])


def test_a_tensor_that_no_rule_is_for_is_refused_at_once() -> None:
    kind = rulec.torch.optimizer(rulec.parse("name: R\napplies_to: ndim == 2\nstep: |\n  direction = g"))
    with pytest.raises(RuleError, match=r"R does not apply to parameter 1, of shape \(3,\), and names no rule for it"):
        kind([torch.zeros(2, 2), torch.zeros(3)], lr=0.1)


def test_a_count_larger_than_the_matrix_is_refused_before_anything_is_written() -> None:
    params = parameters(shapes=[(5,), (4, 6)])
    text = rulec.load("apollo").to_yaml().replace("minimum(rank, rows)", "rank")
    optimizer = rulec.torch.optimizer(rulec.parse(text))(params, rank=5)
    kept = [p.detach().clone() for p in params]
    with pytest.raises(RuleError, match=r"from 1 to 4, not rank = 5 for a matrix of 4 by 6: choose"):
        advance(optimizer, params, range(1))
    assert difference(params, kept) == 0


def test_complex_numbers_have_no_rows_and_columns() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    for name in ("Adafactor", "NorMuon", "SOAP"):
        with pytest.raises(
            TensorError, match=f"{name} does not support complex parameters such as parameter 0, for it treats"
        ):
            getattr(rulec.torch, name)([param])
    for name in ("LAMB", "Prodigy", "DoG", "CautiousAdamW"):
        optimizer = getattr(rulec.torch, name)([param])
        param.grad = torch.full((3, 2), 1 + 2j)
        optimizer.step()
        assert all(v.dtype is torch.complex64 for v in optimizer.state[param].values() if v.shape == param.shape)


def test_seeds() -> None:
    """Random numbers depend on the seed, the parameter's place and the step, and on nothing else."""
    found = []
    for seed in (0, 0, 1):
        params = parameters(shapes=[(4, 6), (4, 6)])
        optimizer = rulec.torch.Apollo([{"params": [p]} for p in params], rank=2, seed=seed)
        advance(optimizer, params, range(2))
        found.append(params)
    assert difference(found[0], found[1]) == 0
    assert difference(found[0], found[2]) > 1
    optimizer.param_groups[0]["seed"] = 7
    with pytest.raises(HyperError, match="seed is one for all groups, and they have"):
        advance(optimizer, params, range(1))
    fresh = {"params": parameters(), "seed": 7}
    optimizer = rulec.torch.Apollo(params)
    with pytest.raises(HyperError, match="seed is one for all groups, and they have"):
        optimizer.add_param_group(fresh)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["GaLore", "Fira", "Apollo", "Dion"])
def test_a_narrow_matrix_has_the_rank_that_it_can_have(name: str) -> None:
    params = parameters(shapes=[(6, 5), (2, 6), (4,)])
    tags = {"tags": ()} if name == "Dion" else {}
    groups = [{"params": [*params[:2]], "rank": 3, **tags}, {"params": [*params[2:]], **tags}]
    optimizer = getattr(rulec.torch, name)(groups)
    assert [route.rank for route in optimizer.routing()] == [None, 2, None]
    assert f"{name} of rank 2\n" in str(optimizer.routing())
    before = [p.detach().clone() for p in params]
    advance(optimizer, params, range(3))
    assert all(torch.isfinite(p).all() for p in params)
    assert not any(torch.equal(p, q) for p, q in zip(params, before, strict=True))
