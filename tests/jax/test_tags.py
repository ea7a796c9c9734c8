"""Tags of parameters of Flax, Equinox and Haiku, and rules for hidden matrices that are given none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import rulec  # noqa: E402
import rulec.jax  # noqa: E402
from rulec.errors import HyperError, TensorError  # noqa: E402

eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")


class Block(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.blocks = nnx.Embed(11, 8, rngs=rngs), nnx.List([Block(rngs), Block(rngs)])
        self.out = nnx.Linear(8, 11, rngs=rngs)


class Compact(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.LayerNorm()(linen.Dense(8)(linen.Embed(11, 8)(x)))
        return linen.Dense(11)(x)


class Arrays(eqx.Module):
    words: Any
    attention: Any
    scale: Any
    proj_out: Any


def of_equinox() -> Any:
    key = jax.random.key(0)
    model = Arrays(
        eqx.nn.Embedding(11, 8, key=key), eqx.nn.MultiheadAttention(2, 8, key=key), eqx.nn.LayerNorm((8, 8)),
        eqx.nn.Linear(8, 11, key=key),
    )  # fmt: skip
    return eqx.filter(model, eqx.is_inexact_array)


def of_haiku() -> Any:
    layers = {f"mlp/~/linear_{i}": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)} for i in range(3)}
    return {"mlp/~/embed": {"embeddings": jnp.ones((5, 4))}, **layers}


#: Model -> its parameters, and the leaves that Muon updates: hidden matrices, and no others.
MODELS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "Flax": (
        lambda: nnx.state(Model(), nnx.Param), {f"blocks/{i}/{name}/kernel" for i in (0, 1) for name in ("up", "down")}
    ),
    "Flax's linen": (
        lambda: Compact().init(jax.random.key(0), jnp.zeros((2, 3), int)), {"params/Dense_0/kernel"}
    ),
    "Equinox": (
        of_equinox, {f"attention/{name}_proj/weight" for name in ("query", "key", "value", "output")}
    ),
    "Equinox's MLP": (
        lambda: eqx.filter(eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0)), eqx.is_inexact_array),
        {"layers/0/weight", "layers/1/weight"},
    ),
    "Haiku": (of_haiku, {"mlp/~/linear_0/w", "mlp/~/linear_1/w"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_hidden_matrices_alone_are_for_muon(name: str) -> None:
    make, hidden = MODELS[name]
    params = make()
    with pytest.raises(TensorError, match=r"give tags=rulec\.jax\.tags_of\(params\) or tags of your own, or tags=\{\}"):
        rulec.jax.init("muon", params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tags = rulec.jax.tags_of(params)
    routing = rulec.jax.routing("muon", params, tags=tags)
    assert {path for path, rule in routing.items() if rule == "Muon"} == hidden
    assert {*routing.values()} == {"Muon", "AdamW"}
    state = rulec.jax.transform("muon", tags=tags).init(params)
    assert len(jax.tree.leaves(state.v)) == len(routing) - len(hidden)


UNTAGGED = {
    "Muon does not apply to dense/bias, of shape (4,), nor to embeddings": {"dense": {"w": (4, 4), "bias": (4,)}},
    "embed is an embedding by its name, and Muon is for hidden matrices": {"embed": (4, 4), "w": (4, 4)},
    "wte/weight is an embedding by its name": {"wte": {"weight": (4, 4)}, "w": (4, 4)},
    "lm_head/kernel is the output layer by its name": {"lm_head": {"kernel": (4, 4)}, "w": (4, 4)},
    "model/score/kernel is the output layer by its name": {"model": {"score": {"kernel": (4, 4)}, "h": {"w": (4, 4)}}},
    "key/bias is a bias or a norm, no matrix, by its name": {"key": {"bias": (4, 4), "w": (4, 4)}},
}


def arrays(shapes: Any) -> Any:
    return jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("sentence", UNTAGGED)
@pytest.mark.parametrize("rule", ["muon", "sam(normuon)"])
def test_without_tags_what_is_no_hidden_matrix_is_refused(sentence: str, rule: str) -> None:
    params = arrays(UNTAGGED[sentence])
    if rule != "muon":
        sentence = sentence.split(",")[0].removeprefix("Muon does not apply to ")
    for call in (rulec.jax.transform(rule).init, lambda p: rulec.jax.init(rule, p)):
        with pytest.raises(TensorError) as caught:
            call(params)
        assert sentence in str(caught.value)
    rulec.jax.init(rule, params, tags={})
    rulec.jax.init(rulec.partition({"...": rule}), params)


@pytest.mark.parametrize("shapes", [{"w1": (4, 4), "w2": (4, 2)}, {"layers": [{"w": (4, 4)}, {"w": (4, 4)}]}])
def test_matrices_alone_need_no_tags(shapes: Any) -> None:
    params = arrays(shapes)
    assert {*rulec.jax.routing("muon", params).values()} == {"Muon"}
    assert {*rulec.jax.routing("adafactor", arrays({"embed": (4, 4), "b": (4,)})).values()} == {"Adafactor"}


def test_names_of_your_own() -> None:
    params = arrays({"book": (9, 4), "a": {"fc1": (4, 4)}, "last": {"w": (4, 9)}})
    with pytest.warns(
        UserWarning, match="tags_of: no output layer is known among the matrices, the last of them last/w"
    ):
        assert rulec.jax.tags_of(params) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tags = rulec.jax.tags_of(params, names={"embedding": "book", "head": ["last/*"]})
        assert tags == {"book": {"embedding"}, "last/w": {"head"}}
        assert rulec.jax.tags_of(params, names={"head": []}) == {}
        shapes = jax.eval_shape(lambda: params)
        assert rulec.jax.tags_of(shapes, names={"embedding": "book", "head": ["last/*"]}) == tags
    with pytest.raises(HyperError, match="names has 3 for 'head': give a pattern"):
        rulec.jax.tags_of(params, names={"head": 3})


def test_an_eager_step_is_refused_as_a_whole_step_is() -> None:
    params = arrays({"dense": {"w": (4, 4), "bias": (4,)}})
    step = rulec.jax.eager_step(lambda p, x: jnp.sum(p["dense"]["w"] @ x + p["dense"]["bias"]), "muon")
    with pytest.raises(TensorError, match="Muon does not apply to dense/bias"):
        step.init(params)


def test_b_is_a_bias_beside_w_alone() -> None:
    tree = {name: jnp.ones((2, 3)) for name in ("w", "b")}
    tags = rulec.jax.tags_of({"linear": tree, "other": {"b": jnp.ones((2, 3))}}, {"head": []})
    assert ("bias" in tags.get("linear/b", ()), "bias" in tags.get("other/b", ())) == (True, False)
