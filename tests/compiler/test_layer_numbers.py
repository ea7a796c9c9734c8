"""`depth` and `depths`: the number of a tensor's layer and the count of layers, in all ways to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import rulec
import rulec.array
import rulec.jax
import rulec.torch
from rulec.compiler.pipeline import _compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError
from rulec.runtime.layers import layers_of
from rulec.standalone.prose import written
from tests.torch.eager.processes import check_in_processes

#: A number beside elements, one that is kept, and branches that are decided before each step.
TEXT = """
name: Layered
hyper: {lr: 1.0}
state: {n: {init: 0, per: tensor}}
step: |
  n = n + depth
  if 0 <= depth and depth < depths:
    k = 10
  else:
    k = depths
  direction = g*(depth + 100*depths) + 1000*k + n
"""

#: Parameters of a model with three layers, as torch calls them, and their layers.
LAYERS = {
    "embed.weight": -1, "layers.0.weight": 0, "layers.0.bias": 0, "layers.1.weight": 1, "layers.2.weight": 2,
    "norm.weight": 3, "head.weight": 3,
}  # fmt: skip

SHAPES: dict[str, tuple[int, ...]] = dict(
    zip(LAYERS, [(4, 3), (3, 3), (3,), (3, 3), (3, 3), (3,), (2, 3)], strict=True)
)

STEPS = 3


def rule() -> rulec.Rule:
    return rulec.parse(TEXT)


def moved(depth: int, depths: int = 3, steps: int = STEPS) -> float:
    """What a tensor has moved after the steps, by arithmetic."""
    k = 10 if 0 <= depth < depths else depths
    return sum(depth + 100 * depths + 1000 * k + depth * step for step in range(1, steps + 1))


def check(params: dict[str, Any], layers: dict[str, int] = LAYERS, depths: int = 3) -> None:
    for name, depth in layers.items():
        np.testing.assert_array_equal(np.asarray(params[name]), -moved(depth, depths), err_msg=name)


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("model.layers.7.attn.q.weight", 7),
        ("transformer.h.11.ln_1.weight", 11),
        ("blocks[2].w", 2),
        ("['layers'][5].kernel", 5),
        ("layers_3/kernel", 3),
        ("Block_4/LayerNorm_0/scale", 4),
        ("Transformer/encoderblock_10/Dense_0/kernel", 10),
        ("mlp/~/linear_1/w", 1),
        ("dense_2/kernel", 2),
        ("layer1.0.conv2.weight", 1),
        ("features.6.conv.0.weight", 6),
        ("transformer/h3_attn/query/w", 3),
        ("rnn.weight_ih_l1", 1),
        ("_orig_mod.module.layers.4._fsdp_wrapped_module.w", 4),
        ("layers.9.self_attn.rel_pos_embed", 9),
        ("layers.8.experts.3.w1", 8),
        ("model.embed_tokens.weight", -1),
        ("bert.embeddings.LayerNorm.weight", -1),
        ("patch_embed.0.weight", -1),
        ("cls_token", -1),
        ("wte.weight", -1),
        ("stem.0.weight", -1),
        ("lm_head.weight", 12),
        ("head.0.weight", 12),
        ("model.norm.weight", 12),
        ("LayerNorm_0/scale", 12),
        ("resnet50.fc.weight", 12),
    ],
)
def test_names(name: str, depth: int) -> None:
    assert layers_of([name, "layers.11.w"], [(), ()])[0] == (depth, 12)


def test_tags_come_first() -> None:
    names = ["layers.3.w", "layers.1.w", "layers.2.w", ""]
    tags = [{"depth=5"}, {"embedding"}, {"head"}, {"depth=0"}]
    assert layers_of(names, tags) == [(5, 6), (-1, 6), (6, 6), (0, 6)]
    assert layers_of(["layers.8.w", "norm.w", ""], [{"depths=16"}, {"depth=16"}, ()]) == [(8, 16), (16, 16), None]
    assert layers_of(["norm.w", "w"], [(), ()]) == [None, None]


@pytest.mark.parametrize(
    ("names", "tags", "message"),
    [
        (["w"], [{"depth=x"}], "the tag 'depth=x' of w must be depth=N, a whole number from -1"),
        (["w"], [{"depth=-2"}], "a whole number from -1"),
        (["w"], [{"depths=0"}], "the tag 'depths=0' of w must be depths=N, a whole number from 1"),
        (["w"], [{"depth=1", "depth=2"}], "the tags of w say two numbers for depth"),
        (["w", "v"], [{"depths=1"}, {"depths=2"}], "tags say depths=1 and depths=2: a model has one count"),
        (["layers.4.w"], [{"depths=4"}], "layers.4.w is in layer 4, and tags say depths=4"),
        (["w"], [{"depth=5", "depths=4"}], "w is in layer 5, and tags say depths=4"),
    ],
)
def test_tags_that_contradict(names: list[str], tags: list[set[str]], message: str) -> None:
    with pytest.raises(RulecError, match=message):
        layers_of(names, tags)


def test_arrays_and_the_reference() -> None:
    params = {name.replace(".", "/"): np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    optimizer = rulec.array.Optimizer(rule(), params)
    reference = ReferenceOptimizer(
        rule(), [np.zeros(s) for s in SHAPES.values()], layers=[(d, 3) for d in LAYERS.values()], arithmetic="mpmath"
    )
    for step in range(STEPS):
        optimizer.step({name: np.ones_like(p) for name, p in params.items()})
        reference.step([np.ones(s) for s in SHAPES.values()])
        if step == 0:
            saved, optimizer = optimizer.state_dict(), rulec.array.Optimizer(rule(), params)
            optimizer.load_state_dict(saved)
    check({name: params[name.replace(".", "/")] for name in LAYERS})
    check(dict(zip(LAYERS, [np.asarray(p, float) for p in reference.params], strict=True)))


def test_lists_are_layers() -> None:
    params = [np.zeros(2), np.zeros((3, 2))]
    optimizer = rulec.array.Optimizer(rule(), params)
    for _ in range(STEPS):
        optimizer.step([np.ones_like(p) for p in params])
    check({"0": params[0], "1": params[1]}, {"0": 0, "1": 1}, 2)


def test_no_program_for_each_layer() -> None:
    """Two programs, of a layer and of other tensors, beside the one that is compiled for no shape."""
    params = {f"layers/{i}": np.zeros((3, i + 1)) for i in range(20)} | {"head": np.zeros((2, 2))}
    before = _compile.cache_info().misses
    rulec.array.Optimizer(rulec.parse(TEXT.replace("1000", "1001")), params).step(
        {n: np.ones_like(p) for n, p in params.items()}
    )
    assert _compile.cache_info().misses - before <= 4


def named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("words", [{}, {"backend": "c"}, {"offload": "step"}], ids=["cpu", "c", "offload"])
def test_groups_of_torch(words: dict[str, Any]) -> None:
    """Layers are of all groups together; a state that was saved goes on."""
    params = named()
    groups = [{"params": [*params.items()][1:6]}, {"params": [*params.items()][:1]}, {"params": [*params.items()][6:]}]
    kind = rulec.torch.optimizer(rule())
    optimizer = kind(groups, **words)
    for step in range(STEPS):
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 0:
            saved = optimizer.state_dict()
            again = [{"params": [*zip(g["param_names"], g["params"], strict=True)]} for g in optimizer.param_groups]
            optimizer = kind(again, **words)
            optimizer.load_state_dict(saved)
    check({name: p.detach() for name, p in params.items()})


def test_tags_of_groups() -> None:
    params = [*named().values()]
    tags = [["embedding"], ["depth=0"], ["depth=0"], ["depth=1"], ["depth=2"], ["head"], ["head"]]
    groups = [{"params": [p], "tags": words} for p, words in zip(params, tags, strict=True)]
    optimizer = rulec.torch.optimizer(rule())(groups)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    check({name: p.detach() for name, p in zip(LAYERS, params, strict=True)})


class Module(nn.Module):
    """A model with the parameters of SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(4, 3), nn.RMSNorm(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=not i) for i in range(3)])
        self.head = nn.Linear(3, 2, bias=False)
        for p in self.parameters():
            p.data.zero_()

    def backward(self) -> None:
        """Gradients of ones."""
        torch.stack([p.sum() for p in self.parameters()]).sum().backward()


def test_updates_in_the_backward_pass() -> None:
    module = Module()
    optimizer = rulec.torch.EagerUpdate(module, rule())
    for _ in range(STEPS):
        with optimizer.backward():
            module.backward()
        optimizer.step()
    check({name: p.detach() for name, p in module.named_parameters()})


def test_a_partition_counts_the_layers_of_the_whole_model() -> None:
    """The layers are of one rule and the embeddings of another; a group that is added has the next layers."""
    module = Module()
    parts = rulec.partition({"layers/**": rule(), "norm/weight": None, "...": rulec.parse(TEXT.replace("Lay", "Pla"))})
    optimizer = rulec.torch.Partitioned(parts, module.named_parameters())
    trained = {name: depth for name, depth in LAYERS.items() if name != "norm.weight"}
    for _ in range(STEPS):
        optimizer.zero_grad()
        module.backward()
        optimizer.step()
    check({name: p.detach() for name, p in module.named_parameters()}, trained)
    more = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [("layers.4.weight", more)]})
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in (*module.parameters(), more):
        p.grad = torch.ones_like(p)
    optimizer.step()
    head = before["head.weight"] - module.head.weight.detach()
    np.testing.assert_array_equal(head, 5 + 100 * 5 + 1000 * 5 + 3 * STEPS + 5)
    np.testing.assert_array_equal(more.detach(), -moved(4, 5, 1))


def _sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    for partition in (False, True):
        module = Module()
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
        parts = rulec.partition({"layers/**": rule(), "...": rulec.parse(TEXT.replace("Layered", "Other"))})
        optimizer = (
            rulec.torch.Partitioned(parts, module.named_parameters())
            if partition
            else rulec.torch.optimizer(rule())(module.named_parameters())
        )
        for _ in range(STEPS):
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        check({name: p.full_tensor().detach() for name, p in module.named_parameters()})  # type: ignore[attr-defined]


@pytest.mark.slow
def test_fully_sharded() -> None:
    check_in_processes(_sharded)


def tree() -> dict[str, Any]:
    """The parameters as a tree of JAX, whose leaves are in the order of their names."""
    return {
        "embed": jnp.zeros((4, 3)), "head": {"kernel": jnp.zeros((3, 2))}, "norm": {"scale": jnp.zeros(3)},
        "layers": [{"w": jnp.zeros((3, 3))} for _ in range(2)], "Block_2": {"kernel": jnp.zeros((3, 3))},
    }  # fmt: skip


TREE = {"embed": -1, "head/kernel": 3, "norm/scale": 3, "layers/0/w": 0, "layers/1/w": 1, "Block_2/kernel": 2}


def leaves(params: Any) -> dict[str, Any]:
    paths, values, _ = rulec.jax.leaves.paths_of(params)
    return {name: value for (_, name), value in zip(paths, values, strict=True)}


def test_jax() -> None:
    params, state = tree(), rulec.jax.init(rule(), tree())
    ones = jax.tree.map(jnp.ones_like, params)
    transformed, tx = tree(), rulec.jax.transform(rule())
    optax_state = tx.init(transformed)
    for _ in range(STEPS):
        params, state = rulec.jax.step(rule(), params, ones, state)
        updates, optax_state = tx.update(ones, optax_state, transformed)
        transformed = jax.tree.map(jnp.add, transformed, updates)
    check(leaves(params), TREE)
    check(leaves(transformed), TREE)


def test_tags_of_jax_by_patterns() -> None:
    params = {"a": jnp.zeros(2), "b": {"x": jnp.zeros(2), "y": jnp.zeros(2)}}
    tags = rulec.jax.tags_of(params, {"depth=0": "a", "depth=1": "b/*", "head": []})
    params = jax.tree.map(jnp.zeros_like, params)
    state = rulec.jax.init(rule(), params, tags=tags)
    ones = jax.tree.map(jnp.ones_like, params)
    for _ in range(STEPS):
        params, state = rulec.jax.step(rule(), params, ones, state, tags=tags)
    check(leaves(params), {"a": 0, "b/x": 1, "b/y": 1}, 2)


def test_mlx() -> None:
    mx = pytest.importorskip("mlx.core")

    import rulec.mlx

    params: dict[str, Any] = {
        "embed": {"weight": mx.zeros((4, 3))},
        "layers": [{"weight": mx.zeros((3, 3))} for _ in "ab"],
    }
    optimizer = rulec.mlx.optimizer(rule())()
    grads = {"embed": {"weight": mx.ones((4, 3))}, "layers": [{"weight": mx.ones((3, 3))} for _ in "ab"]}
    for _ in range(STEPS):
        params = optimizer.apply_gradients(grads, params)
    arrays = {
        "embed": params["embed"]["weight"],
        "0": params["layers"][0]["weight"],
        "1": params["layers"][1]["weight"],
    }
    check({name: np.array(p) for name, p in arrays.items()}, {"embed": -1, "0": 0, "1": 1}, 2)


def test_a_state_goes_on_in_another_framework(tmp_path: Path) -> None:
    """A step in torch, one in JAX and one on arrays."""
    file, params = tmp_path / "state.safetensors", {f"layers.{i}.w": nn.Parameter(torch.zeros(3)) for i in range(2)}
    optimizer = rulec.torch.optimizer(rule())([*params.items()])
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    rulec.torch.save(optimizer, file)
    in_jax = {"layers": [{"w": jnp.asarray(p.detach().numpy())} for p in params.values()]}
    state = rulec.jax.load(file, rule(), in_jax)
    in_jax, state = rulec.jax.step(rule(), in_jax, jax.tree.map(jnp.ones_like, in_jax), state)
    rulec.jax.save(file, rule(), in_jax, state)
    arrays = {f"layers/{i}/w": np.array(leaf["w"]) for i, leaf in enumerate(in_jax["layers"])}
    on_arrays = rulec.array.Optimizer(rule(), arrays)
    rulec.array.load(on_arrays, file)
    on_arrays.step({name: np.ones_like(p) for name, p in arrays.items()})
    check(arrays, {"layers/0/w": 0, "layers/1/w": 1}, 2)


def test_mistakes() -> None:
    """No name tells a layer; and places where a layer is not known."""
    unnamed = [nn.Parameter(torch.zeros(2))]
    remedy = r"name the parameters, as named_parameters\(\) does \(layers.3.weight\), or give it the tag 'depth=3'"
    with pytest.raises(RulecError, match=f"Layered reads depth, and no name tells the layer of parameter 0: {remedy}"):
        rulec.torch.optimizer(rule())(unnamed)
    with pytest.raises(RulecError, match="no name tells the layer of w"):
        rulec.array.Optimizer(rule(), {"w": np.zeros(2)})
    with pytest.raises(RulecError, match="no name tells the layer of w"):
        rulec.jax.init(rule(), {"w": jnp.zeros(2)})
    with pytest.raises(RulecError, match="depends on depth, which differs between tensors of one kernel"):
        ReferenceOptimizer(rulec.parse("name: R\nstep: |\n  p = p + sum(eye(depth + 2))\n"), [np.ones((2, 3))])
    with pytest.raises(RulecError, match="depth"):
        rulec.parse("name: R\nhyper: {depth: 1}\nstep: |\n  p = p*depth\n")
    with pytest.raises(RulecError, match="it reads depth, and what is written sees one tensor, and no group or layer"):
        written(rule(), "c")


@pytest.mark.parametrize("name", ["tensor", "depths"])
def test_eager_updates_of_jax_refuse_numbers(name: str) -> None:
    """A parameter is updated alone there: until lately it was tensor 0 of 1."""
    read = rulec.parse(f"name: R\nstep: |\n  direction = g*{name}\n")
    step = rulec.jax.eager_step(lambda params, x: (params["layers"][0] * x).sum(), read)
    with pytest.raises(RulecError, match=f"R reads {name}, and an eager update sees one parameter at a time"):
        step.init({"layers": [jnp.ones(3)]})


def test_a_statistic_of_no_layer_is_nan() -> None:
    weights = {"w": np.ones(2)}
    optimizer = rulec.array.Optimizer("sgd", weights, watch={"d": "depth*1"})
    optimizer.step({"w": np.ones(2)})
    assert np.isnan(optimizer.statistics()["d"]["w"])
