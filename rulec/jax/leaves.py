"""The leaves of a tree of arrays: their names, errors for leaves that no rule can update, and matrices beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.compiler.layout import FLOATS
from rulec.errors import TensorError
from rulec.functional.plan import StepPlan

#: The name of a leaf that is the whole tree.
WHOLE = "the parameter"


@dataclass(frozen=True)
class Tree:
    """The leaves of a tree of arrays in their order, and its structure.

    Complex arrays are pairs of reals here, with one more axis; `paired` are their places. Leaves at the `untrained`
    places are of any dtype, and those at the `absent` ones among them are not in the structure.
    """

    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    structure: Any
    paired: frozenset[int] = frozenset()
    untrained: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()

    @property
    def whole(self) -> Tree:
        """The tree of the leaves of the structure."""
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the leaf of each array."""
        return self.names

    def apart(self, values: Sequence[Any]) -> list[Any]:
        """A value for each array, from those for each leaf of the structure."""
        return [*values]

    def of(self, arrays: Sequence[Any]) -> Any:
        """Other arrays, or None, in the same structure; complex where this tree's arrays are."""
        return self.holding([
            unpaired(array) if place in self.paired and array is not None else array
            for place, array in enumerate(arrays)
        ])  # fmt: skip

    def holding(self, values: Sequence[Any]) -> Any:
        """Values of any shape, one for each leaf, in the same structure."""
        return self.structure.unflatten(x for place, x in enumerate(values) if place not in self.absent)

    def check_real(self, why: str) -> None:
        """TensorError where a leaf is complex."""
        if self.paired:
            raise TensorError(
                f"the parameter {self.names[min(self.paired)]} is complex, and {why}: give its real and its imaginary "
                f"part as leaves of their own"
            )


#: Gives, of the names of leaves, those that are not trained.
Untrained = Callable[[Sequence[str]], Collection[str]]


def flat(tree: Any, what: str, wide: bool = True, untrained: Untrained = lambda names: ()) -> Tree:
    """A tree's arrays by their paths, as in `layer/0/kernel`; TensorError for a leaf that no rule can update.

    `untrained` leaves may be of any dtype: whole numbers, truth values, keys of random numbers.
    TensorError also where two paths have equal names, since masks, patterns and tags would mean both. If JAX is not
    `wide`, kept to 32 bits by its user, leaves of float64 are refused, and numbers of Python are float32.
    """
    paths, leaves, structure = paths_of(tree)
    names = tuple(name for _, name in paths)
    check_apart(names)
    others = frozenset(untrained(names))
    places = frozenset(place for place, name in enumerate(names) if name in others)
    arrays = [
        array if name in others else _checked(array, called(what, name), wide)
        for name, array in zip(names, leaves, strict=True)
    ]
    pairs = frozenset(i for i, array in enumerate(arrays) if i not in places and jnp.iscomplexobj(array))
    arrays = [paired(array) if place in pairs else array for place, array in enumerate(arrays)]
    return Tree(names, tuple(arrays), structure, pairs, places)


def is_part(tree: Any) -> bool:
    """Whether a mask of optax, as those of `multi_transform`, took some leaves out of a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return any(isinstance(leaf, optax.MaskedNode) for leaf in leaves)


def paths_of(tree: Any) -> tuple[list[tuple[Sequence[Any], str]], list[Any], Any]:
    """The keys and the name of each leaf, the leaves, and the tree's structure."""
    flattened, structure = jax.tree_util.tree_flatten_with_path(tree)
    variables = _variables(tree)
    keys = [path[:-1] if path[:-1] in variables else path for path, _ in flattened]
    return [(path, leaf_name(path)) for path in keys], [leaf for _, leaf in flattened], structure


def _variables(tree: Any) -> set[Any]:
    """The paths of Flax's variables: Flax holds arrays in variables at first, and bare ones later."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return set()
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {path for path, leaf in paths if isinstance(leaf, nnx.Variable) and hasattr(leaf.get_raw_value(), "dtype")}


def leaf_name(path: Sequence[Any]) -> str:
    """The name of a leaf: the keys on its path, joined by `/`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or WHOLE


def check_apart(names: Sequence[str]) -> None:
    """TensorError where two leaves have one name, as with the keys `a/b` and, in `a`, `b`."""
    if len(set(names)) < len(names):
        name = next(name for place, name in enumerate(names) if name in names[:place])
        raise TensorError(f"two leaves are called {name} by the keys on their paths: give each a name of its own")


def called(what: str, name: str) -> str:
    """The words for a leaf in a sentence."""
    return what if name == WHOLE and what == WHOLE else f"{what} {name}"


def _checked(array: Any, name: str, wide: bool) -> Any:
    if isinstance(array, float) or (str(array.dtype) == "float64" and getattr(array, "weak_type", False)):
        return jnp.asarray(array).astype(jnp.float64 if wide else jnp.float32)
    if str(array.dtype) not in (*FLOATS, *COMPLEX.values()):
        raise TensorError(
            f"{name} is of {array.dtype}, and only {', '.join((*FLOATS, *COMPLEX.values()))} can be updated: leave "
            f"it out, as with optax.masked, or cast it"
        )
    if str(array.dtype) in ("float64", "complex128") and not wide:
        raise TensorError(
            f"{name} is of {array.dtype}, and JAX is kept to 32 bits: allow it 64 with "
            f"jax.config.update('jax_enable_x64', True) before arrays are made, or cast to "
            f"{'float32' if str(array.dtype) == 'float64' else 'complex64'}"
        )
    # Beside a number of Python, which is one of 64 bits here, an array of weak type would become one as well.
    weak = isinstance(array, jax.Array) and array.weak_type
    return jax.lax.convert_element_type(array, array.dtype) if weak else array


def like(tree: Any, model: Tree, what: str, wide: bool = True) -> Tree:
    """A tree's arrays where it has the structure of `model` and its shapes; TensorError otherwise.

    In the place of untrained leaves it may have anything, or nothing, and has the arrays of `model` afterwards.
    """
    others = [model.names[place] for place in model.untrained]
    flattened = flat(tree, what, wide, lambda names: others)
    if flattened.structure != model.structure:
        flattened = _with_untrained(flattened, model, what)
    arrays = []
    for place, (name, array, param) in enumerate(zip(flattened.names, flattened.arrays, model.arrays, strict=True)):
        if place in model.untrained:
            arrays.append(param)
            continue
        if place in flattened.paired - model.paired:
            raise TensorError(f"{what} {name} is complex, and its parameter real: give its real part")
        if place in model.paired - flattened.paired:
            array = jnp.stack([array, jnp.zeros_like(array)], -1)
        if array.shape != param.shape:
            kept = -1 if place in model.paired else None
            raise TensorError(
                f"{what} {name} has shape {array.shape[:kept]}, its parameter {tuple(param.shape)[:kept]}"
            )
        arrays.append(array)
    return replace(flattened, arrays=tuple(arrays), paired=model.paired)


def _with_untrained(flattened: Tree, model: Tree, what: str) -> Tree:
    """The arrays in the order of `model`, with untrained ones absent; TensorError where others are missing or extra."""
    place_of = {name: place for place, name in enumerate(flattened.names)}
    absent = frozenset(place for place, name in enumerate(model.names) if name not in place_of)
    present = [name for place, name in enumerate(model.names) if place not in absent]
    if not absent or not absent <= model.untrained or present != [*flattened.names]:
        raise _other_structure(flattened, model, what)
    arrays = tuple(flattened.arrays[place_of[name]] if name in place_of else None for name in model.names)
    pairs = frozenset(model.names.index(flattened.names[place]) for place in flattened.paired)
    return Tree(model.names, arrays, flattened.structure, pairs, model.untrained, absent)


def _other_structure(flattened: Tree, model: Tree, what: str) -> TensorError:
    trained = [name for place, name in enumerate(model.names) if place not in model.untrained]
    missing = [name for name in trained if name not in set(flattened.names)]
    extra = [name for name in flattened.names if name not in set(model.names)]
    if missing:
        return TensorError(
            f"{what} {missing[0]} is missing (None, or no leaf): every parameter needs one; leave those that are not "
            f"trained out of the tree, as with optax.masked"
        )
    if extra:
        return TensorError(f"{what} {extra[0]} is given, and there is no such parameter: leave it out, or set it None")
    return TensorError(
        f"the containers of the parameters are {model.structure}, and those of {what} them {flattened.structure}: give "
        f"both in the same"
    )


#: dtype of the real and imaginary parts -> complex dtype.
COMPLEX = {"float32": "complex64", "float64": "complex128"}


def matrices_by_leaf(tree: Any, model: Tree, what: str) -> list[Any]:
    """The matrix of each leaf of `model`, None where the tree has none; TensorError for one of no leaf."""
    paths, leaves, _ = paths_of(tree)
    matrices = {name: leaf for (_, name), leaf in zip(paths, leaves, strict=True)}
    for name in matrices:
        if name not in model.names:
            raise TensorError(f"{called(what, name)} is given, and there is no such parameter: leave it out")
    return [matrices.get(name) for name in model.names]


def check_inputs(plan: StepPlan, inputs: Mapping[str, Any]) -> None:
    """TensorError where a matrix that a step reads is missing, or of another shape or dtype."""
    for bucket in plan.buckets:
        for buffer in bucket.program.buffers:
            if buffer.role != "input" or buffer.axes.number or buffer.axes.elementwise or buffer.name not in inputs:
                continue
            for i, place in enumerate(bucket.places):
                what = f"the input {buffer.name} of {plan.leaves[place].name}"
                wanted = bucket.kept_shape(i, buffer.axes), bucket.layout.dtype(buffer.name)
                _check_matrix(inputs[buffer.name][place], what, *wanted)


def _check_matrix(matrix: Any, what: str, shape: Sequence[int], dtype: str) -> None:
    if matrix is None:
        raise TensorError(f"{what} is missing: the rule of this parameter needs a matrix of shape {tuple(shape)}")
    if jnp.shape(matrix) != tuple(shape):
        raise TensorError(f"{what} has shape {jnp.shape(matrix)}, where {tuple(shape)} is expected")
    if str(jnp.result_type(matrix)) != dtype:
        raise TensorError(f"{what} is of {jnp.result_type(matrix)}, where {dtype} is expected")


def paired(array: Any) -> Any:
    """A complex array as reals, with a last axis of the real and the imaginary part; a real array as it is."""
    return jnp.stack([jnp.real(array), jnp.imag(array)], axis=-1) if jnp.iscomplexobj(array) else array


def unpaired(array: Any) -> Any:
    """The inverse; pairs whose dtype has no complex counterpart stay pairs."""
    return jax.lax.complex(array[..., 0], array[..., 1]) if str(array.dtype) in COMPLEX else array
