"""The roles of parameters in a network, by their paths and shapes: embeddings, output layers, norms, biases, vectors.

| tag | parameters |
|---|---|
| `embedding` | tables of embeddings |
| `head` | the output layer |
| `norm` | scales and shifts of norms |
| `bias` | parameters with `bias` in their name |
| `vector` | parameters of two dimensions or more that are no matrices: with one extent above 1, or biases and norms |
| `kernel` | parameters of more than two dimensions, where tags are found for each parameter by itself |

A shape does not tell an output layer, for other layers may be as wide: its name does, or its place in a sequence. If
there are no names, the shapes of all parameters together are asked (`guessed_roles`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

#: The tags, in their order.
TAGS = ("embedding", "head", "norm", "bias", "vector")

Path = tuple[str, ...]

#: Modules that are output layers wherever they are.
_ANYWHERE = frozenset({
    "head", "lm_head", "classifier", "unembed", "unembedding", "embed_out", "to_logits", "output_projection", "lm_loss",
    "mlm_head", "vocab_projector", "qa_outputs",
})  # fmt: skip

#: Modules at the top of a model that are its output, with all that is in them.
_AT_THE_TOP = frozenset({"output", "fc", "heads", "cls", "logits", "predictions"})

#: Modules at the top of a model that are its output where they have one matrix: larger ones are networks.
_ALONE_AT_THE_TOP = frozenset({
    "out", "out_proj", "proj_out", "score", "decoder", "output_layer", "output_proj", "out_layer", "fc_out", "final",
    "final_layer", "final_proj", "last_linear", "generator",
})  # fmt: skip

#: Parameters and modules of an attention: a projection beside one is hidden.
_ATTENTION = re.compile(r"(to_)?(q|k|v|qkv|query|key|value)(_proj)?|in_proj_(weight|bias)", re.I)

#: Modules of a block: a layer beside one is hidden.
_BLOCK = re.compile(r".*attn.*|.*attention.*", re.I)

#: Layers that are called by their kind and a number: the last one at the top is the output.
_NUMBERED = re.compile(r"(dense|densegeneral|linear|fc|lin)_?(\d*)", re.I)

#: Modules and parameters of embeddings by their names, and modules of norms.
_EMBEDDING = re.compile(r"(?!unembed|embed_out).*embed.*|(.*_)?emb|wte|wpe|shared|relative_attention_bias", re.I)
_NORM = re.compile(r".*norm.*|(.*_)?(ln|bn)(_.*|\d+)?", re.I)

#: Parts of paths that wrappers of a layer add.
_WRAPPED = re.compile(r"parametrizations|base_layer|original_module|modules_to_save|lora_.*")


def head_places(paths: Sequence[Path], dims: Sequence[int], by_place: bool = True) -> set[int]:
    """The indices of the parameters of output layers; `dims` has the number of dimensions of each parameter.

    They are known by name, or else `by_place`, as the last layer of a sequence of layers.
    """
    wrapped = {place for place, path in enumerate(paths) if any(map(_WRAPPED.fullmatch, path))}
    paths = [*map(_plain, paths)]
    heads = {place for place, path in enumerate(paths) if _ANYWHERE.intersection(path[:-1])}
    top = _Level([*range(len(paths))], paths, dims).descended()
    for name, places in top.modules.items():
        matrices = [place for place in places if dims[place] >= 2 and place not in wrapped]
        alone = name in _ALONE_AT_THE_TOP and len(matrices) <= 1 and not top.attends
        if name in _AT_THE_TOP or alone:
            heads.update(places)
    named = not by_place or any(dims[place] >= 2 for place in heads)
    return heads if named else heads | set(top.last())


def named_roles(
    paths: Sequence[Path], shapes: Sequence[Sequence[int]], kinds: Sequence[str] = (), by_place: bool = True
) -> list[set[str]]:
    """The tags of parameters by their paths, and by the classes of their modules where `kinds` has these.

    `by_place` knows an output layer also as the last of a sequence.
    """
    heads = head_places(paths, [*map(len, shapes)], by_place)
    known = {*paths}
    roles = []
    for place, (path, shape, kind) in enumerate(zip(paths, shapes, kinds or [""] * len(paths), strict=True)):
        *modules, leaf = path
        module = modules[-1] if modules else ""
        tags = {"head"} if place in heads else set()
        if kind in ("Embed", "Embedding") or _EMBEDDING.fullmatch(leaf) or _EMBEDDING.fullmatch(module):
            tags.add("embedding")
        if "Norm" in kind or _NORM.fullmatch(module):
            tags.add("norm")
        if "bias" in leaf or (leaf == "b" and (*modules, "w") in known):
            tags.add("bias")
        if is_vector(shape, tags):
            tags.add("vector")
        roles.append(tags)
    return roles


def guessed_roles(shapes: Sequence[Sequence[int]]) -> list[set[str]]:
    """The tags of parameters without names, by the first two extents of all of them, in their order.

    The extent of a hidden layer is that of the next one, too. So a matrix is an embedding, or an input or output layer,
    where no other matrix has one of its extents, or only one has it, first too or in the same shape, and one of the two
    is the last of all: an embedding and its output layer. With a first extent of 1 it is a vector.
    """
    alone = [is_vector(shape, ()) or (len(shape) > 2 and shape[0] == 1) for shape in shapes]
    matrices = [place for place, shape in enumerate(shapes) if len(shape) == 2 or (len(shape) > 2 and not alone[place])]
    extents = {place: {extent for extent in shapes[place][:2] if extent > 1} for place in matrices}
    owners: dict[int, list[int]] = defaultdict(list)
    for place in matrices:
        for extent in extents[place]:
            owners[extent].append(place)
    roles: list[set[str]] = [{"vector"} if vector else set() for vector in alone]
    for extent, places in owners.items():
        first = all(shapes[place][0] == extent for place in places)
        alike = first or extents[places[0]] == extents[places[-1]]
        twins = len(places) == 2 and places[1] == matrices[-1] and alike
        for place in places if len(places) == 1 or twins else ():
            roles[place].add("head" if place == matrices[-1] else "embedding")
    return roles


def _plain(path: Path) -> Path:
    """A path without the parts that wrappers of a layer add."""
    first = next((i for i, part in enumerate(path) if _WRAPPED.fullmatch(part)), len(path))
    return (*path[:first], path[-1]) if first < len(path) else path


class _Level:
    """The modules of a part of a model by name, each with the indices of its parameters; `depth` parts lead there."""

    def __init__(self, places: Sequence[int], paths: Sequence[Path], dims: Sequence[int], depth: int = 0) -> None:
        self._paths, self._dims, self._depth = paths, dims, depth
        self.modules: dict[str, list[int]] = {}
        self._alone = [place for place in places if len(paths[place]) == depth + 1]
        for place in places:
            if len(paths[place]) > depth + 1:
                self.modules.setdefault(paths[place][depth], []).append(place)
        names = [*self.modules, *(paths[place][depth] for place in self._alone)]
        self.attends = any(map(_ATTENTION.fullmatch, names))

    def inside(self, name: str) -> _Level:
        """The modules of one of the modules."""
        return _Level(self.modules[name], self._paths, self._dims, self._depth + 1)

    def descended(self) -> _Level:
        """The level where a model begins, inside of wrappers without parameters."""
        if len(self.modules) != 1 or self._alone:
            return self
        only = self.inside(*self.modules)
        return only.descended() if only.modules and not only._alone else self

    def is_layer(self, name: str) -> bool:
        """Whether a module has a matrix, and no modules."""
        places = self.modules[name]
        return not self.inside(name).modules and any(self._dims[place] >= 2 for place in places)

    def last(self) -> list[int]:
        """The parameters of the last layer of a sequence of layers; none where there is no such sequence."""
        if self.attends or not self.modules or any(map(_BLOCK.fullmatch, self.modules)):
            return []
        if all(map(str.isdecimal, self.modules)):
            name = max(self.modules, key=int)
            return self.modules[name] if self.is_layer(name) else self.inside(name).last()
        layers = {name: match for name in self.modules if (match := _NUMBERED.fullmatch(name)) and self.is_layer(name)}
        if len({match[1] for match in layers.values()}) != 1:
            return []
        return self.modules[max(layers, key=lambda name: int(layers[name][2] or 0))]


def is_embedding(part: str) -> bool:
    """Whether a part of a name is a word for embeddings."""
    return _EMBEDDING.fullmatch(part) is not None


def is_output(part: str) -> bool:
    """Whether a part of a name is a word for output layers, wherever it is."""
    return part in _ANYWHERE


def is_vector(shape: Sequence[int], tags: Collection[str]) -> bool:
    """Whether a parameter of two dimensions or more is no matrix: by one extent above 1, or as a bias or a norm."""
    alone = sum(extent > 1 for extent in shape) <= 1
    return len(shape) >= 2 and (alone or not {"bias", "norm"}.isdisjoint(tags))


def no_head(names: Sequence[str], dims: Sequence[int], keyword: str) -> str:
    """The sentence for a model with matrices, none of them known as its output layer; empty without matrices."""
    matrices = [name for name, count in zip(names, dims, strict=True) if count >= 2]
    if not matrices:
        return ""
    return (
        f"no output layer is known among the matrices, the last of them {matrices[-1]}, so a rule for hidden matrices "
        f"such as Muon takes them all: name it with {keyword}={{'head': ...}}, or give {keyword}={{'head': []}} where "
        f"there is none"
    )
