"""Tags of models: output layers by their names and places, vectors that are stored as matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import rulec.torch


class Net(nn.Module):
    """Hidden layers, and modules by name."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])
        for name, module in modules.items():
            setattr(self, name, module)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def tagged(model: nn.Module, tag: str = "head") -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = rulec.torch.tagged_groups(model)
    return [name for group in groups if tag in group["tags"] for name, _ in group["params"]]


HEADS = (
    "head", "lm_head", "classifier", "unembed", "output", "fc", "out", "out_proj", "proj_out", "score", "decoder",
    "cls", "qa_outputs", "logits", "heads", "embed_out", "to_logits", "output_projection", "final_layer",
    "vocab_projector", "linear", "fc2",
)  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, lambda model: Wrapper(Wrapper(model))])
@pytest.mark.parametrize("name", HEADS)
def test_an_output_layer_is_known_by_its_name(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(Net(**{name: nn.Linear(8, 5)}))
    assert [path.split(".")[-2:] for path in tagged(model)] == [[name, "weight"], [name, "bias"]]
    assert not [warning for warning in warned(model) if "no output layer" in warning]


def warned(model: nn.Module, **keywords: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rulec.torch.tagged_groups(model, **keywords)
    return [str(warning.message) for warning in caught]


def sequential(last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), last)


HIDDEN = {
    "an attention": nn.MultiheadAttention(8, 2),
    "a layer": nn.TransformerEncoderLayer(8, 2, 16),
    "layers": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
    "a decoder of layers": nn.Transformer(8, 2, 1, 1, 16),
    "blocks with projections": Net(blocks=nn.ModuleList([nn.ModuleDict({"out_proj": nn.Linear(8, 8)})])),
    "a sequence that ends in a norm": sequential(nn.LayerNorm(8)),
    "a sequence that ends in an attention": sequential(nn.MultiheadAttention(8, 2)),
    "a score of several layers": Net(score=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_matrices_stay_hidden_and_a_warning_says_so(kind: str) -> None:
    model = HIDDEN[kind]
    assert tagged(model) == []
    last = [name for name, param in model.named_parameters() if param.dim() == 2][-1]
    (sentence,) = warned(model)
    assert sentence.startswith(f"tagged_groups: no output layer is known among the matrices, the last of them {last}")
    assert warned(model, names={"head": []}) == []


SEQUENCES = {
    "3.": sequential(nn.Linear(8, 3)),
    "0.3.": Wrapper(sequential(nn.Linear(8, 3))).module,
    "1.1.": nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))),
    "10.": nn.Sequential(*(nn.Linear(4, 4) for _ in range(11))),
    "4.": nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Identity(), weight_norm(nn.Linear(8, 3))),
}


@pytest.mark.parametrize("place", SEQUENCES)
def test_the_last_layer_of_a_sequence_is_the_output(place: str) -> None:
    heads = tagged(SEQUENCES[place])
    assert heads
    assert {name[: len(place.removeprefix("0."))] for name in heads} == {place.removeprefix("0.")}


def test_a_matrix_of_one_row_and_what_is_no_matrix_are_vectors() -> None:
    class NormedLinear(nn.Linear):
        pass

    class RMSNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_magnitude_vector = nn.Parameter(torch.ones(1, 8))
            self.relative_bias = nn.Parameter(torch.ones(9, 2))

    model = nn.ModuleDict({
        "normed": weight_norm(nn.Linear(4, 8)), "matrix": NormedLinear(4, 4), "norm": RMSNorm2d(), "scale": Scale(),
        "layer": nn.LayerNorm((4, 4)), "value": nn.Linear(8, 1), "plain": nn.LayerNorm(4), "head": nn.Linear(4, 3),
    })  # fmt: skip
    assert sorted(tagged(model, "vector")) == [
        "layer.bias", "layer.weight", "norm.weight", "normed.parametrizations.weight.original0",
        "scale.lora_magnitude_vector", "scale.relative_bias", "value.weight",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        routing = rulec.torch.Muon(rulec.torch.tagged_groups(model)).routing()
    assert {route.name for route in routing if route.rule.name == "Muon"} == {
        "normed.parametrizations.weight.original1", "matrix.weight",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "head"),
    [
        ("BertForMaskedLM", "BertConfig", "bert.embeddings.word_embeddings.weight"),
        ("BertForQuestionAnswering", "BertConfig", "qa_outputs.weight"),
        ("LlamaForSequenceClassification", "LlamaConfig", "score.weight"),
        ("T5ForConditionalGeneration", "T5Config", "shared.weight"),
        ("WhisperForConditionalGeneration", "WhisperConfig", "model.decoder.embed_tokens.weight"),
        ("GPTNeoXForCausalLM", "GPTNeoXConfig", "lm_head.weight"),
        ("XLNetLMHeadModel", "XLNetConfig", "transformer.word_embedding.weight"),
        ("OPTForCausalLM", "OPTConfig", "model.decoder.embed_tokens.weight"),
        ("ViTForImageClassification", "ViTConfig", "classifier.weight"),
    ],
)
def test_output_layers_of_published_models(kind: str, config: str, head: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, config)())
    heads = tagged(model)
    assert head in heads
    assert not [name for name in heads if "layer." in name or "block" in name]


def test_a_model_may_be_said_to_have_no_output_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "1.weight" in tagged(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = rulec.torch.tagged_groups(model, {"head": []})
    assert not any("head" in group["tags"] for group in groups)
