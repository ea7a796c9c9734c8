"""The roles of a parameter's axes, and the tensors that a rule sees of a parameter.

Rules of matrices take rows for a layer's outputs and columns for its inputs, as torch keeps layers. Other frameworks
keep the same layers in other layouts. A role says for each axis of an array what it is in the layer:

| role | axis |
|---|---|
| `batch` | of equal layers, experts or heads: each is a tensor of its own |
| `outputs` | of the layer's outputs |
| `inputs` | of the layer's inputs |
| `window` | of a convolution's window |

A rule sees a tensor for each index of the batch: all outputs joined to one axis, all inputs joined to one, and then the
axes of the window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from rulec.compiler.routing import Router
from rulec.errors import HyperError, TensorError
from rulec.language.expr.node import Kind, Op, walk
from rulec.language.partition import matches
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_numbers, sees_shape
from rulec.language.source import did_you_mean

#: The roles, in the order in which a rule sees axes.
ROLES = ("batch", "outputs", "inputs", "window")


@dataclass(frozen=True)
class Orientation:
    """The shape and the roles of an array, and the tensors that a rule sees of it.

    `xp` of the methods is a module of an array library, or `keras.ops`.
    """

    shape: tuple[int, ...]
    roles: tuple[str, ...]

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The axes of the array in the order of their roles."""
        return tuple(sorted(range(len(self.shape)), key=lambda axis: ROLES.index(self.roles[axis])))

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """The extents of the batch; empty where the array is one tensor."""
        return self._extents("batch")

    @functools.cached_property
    def seen(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        joined = [math.prod(self._extents(role)) for role in ("outputs", "inputs") if role in self.roles]
        return (*joined, *self._extents("window"))

    @property
    def count(self) -> int:
        """The number of tensors."""
        return math.prod(self.batch)

    @property
    def is_plain(self) -> bool:
        """Whether the array itself is the one tensor."""
        return not self.batch and self.seen == self.shape and self.order == (*range(len(self.shape)),)

    def _extents(self, role: str) -> tuple[int, ...]:
        return tuple(n for n, word in zip(self.shape, self.roles, strict=True) if word == role)

    def stacked(self, array: Any, xp: Any) -> Any:
        """The tensors of an array as one array: the extents of the batch, then the shape of each tensor."""
        return xp.reshape(xp.transpose(array, self.order), (*self.batch, *self.seen))

    def unstacked(self, stack: Any, xp: Any) -> Any:
        """The inverse of `stacked`."""
        turned = xp.reshape(stack, tuple(self.shape[axis] for axis in self.order))
        return xp.transpose(turned, tuple(sorted(range(len(self.shape)), key=self.order.__getitem__)))

    def of_each(self, stack: Any, xp: Any) -> list[Any]:
        """An array for each tensor, from one that begins with the extents of the batch."""
        if not self.batch:
            return [stack]
        flat = xp.reshape(stack, (self.count, *stack.shape[len(self.batch) :]))
        return [flat[i] for i in range(self.count)]

    def of_all(self, arrays: Sequence[Any], xp: Any) -> Any:
        """The inverse of `of_each`, for arrays of one shape."""
        if not self.batch:
            return arrays[0]
        return xp.reshape(xp.stack([*arrays]), (*self.batch, *arrays[0].shape))

    def apart(self, array: Any, xp: Any) -> list[Any]:
        """The tensors of an array."""
        return self.of_each(self.stacked(array, xp), xp)

    def joined(self, tensors: Sequence[Any], xp: Any) -> Any:
        """The inverse of `apart`."""
        return self.unstacked(self.of_all(tensors, xp), xp)

    def names(self, path: str) -> list[str]:
        """The name of each tensor of the array at a path: the path, with its index where the array is a batch."""
        return [f"{path}/{self._index(i)}" for i in range(self.count)] if self.batch else [path]

    def _index(self, number: int) -> str:
        """The index in the batch of one of the tensors, as a path."""
        words = []
        for extent in reversed(self.batch):
            number, place = divmod(number, extent)
            words.append(str(place))
        return "/".join(reversed(words))


@dataclass(frozen=True)
class _Numbers:
    """The numbers of the axes of inputs and outputs, as optax's `MuonDimensionNumbers` has them."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def roles(self, path: str, count: int) -> tuple[str, ...]:
        """The roles of so many axes: an axis without a number is of the batch."""
        words = ["batch"] * count
        for role, axes in (("inputs", self.inputs), ("outputs", self.outputs)):
            for axis in axes:
                if not -count <= axis < count or words[axis] != "batch":
                    raise TensorError(
                        f"the axes {self.inputs} and {self.outputs} of {path}, which has {count}, must be axes of it, "
                        f"each named once"
                    )
                words[axis] = role
        return tuple(words)


#: A role for each axis, or dimension numbers, or None for an array as torch keeps it.
Roles: TypeAlias = tuple[str, ...] | _Numbers | None


@dataclass(frozen=True)
class AxisRoles:
    """The roles of the axes of parameters by patterns of their paths, as `roles_of` reads them from users.

    An entry is a pattern with the roles of each axis, or with None for arrays as torch keeps them.
    """

    entries: tuple[tuple[str, Roles], ...] = ()

    @functools.cached_property
    def _by_path(self) -> Mapping[str, Roles]:
        return dict(self.entries)

    @functools.cached_property
    def _patterns(self) -> Sequence[tuple[str, Roles]]:
        return [(pattern, roles) for pattern, roles in self.entries if {*"*?["} & {*pattern}]

    def _of(self, path: str) -> Iterator[tuple[str, Roles]]:
        """The entries of a path: its own entry, and every pattern for it."""
        if path in self._by_path:
            yield path, self._by_path[path]
        yield from (entry for entry in self._patterns if entry[0] != path and _matches(entry[0], path))

    def of(self, path: str, shape: Sequence[int]) -> Orientation | None:
        """The orientation of a parameter, by the first entry of its path that has as many roles as it has axes.

        The path itself comes before patterns. The result is None where the path has no entry, or an entry that is None.
        TensorError where all entries have another number of roles.
        """
        others = []
        for pattern, roles in self._of(path):
            if roles is None:
                return None
            words = roles.roles(path, len(shape)) if isinstance(roles, _Numbers) else roles
            if len(words) == len(shape):
                return Orientation(tuple(shape), words)
            others.append(f"{pattern!r} gives it {len(words)}")
        if others:
            raise TensorError(
                f"the parameter {path} of shape {tuple(shape)} needs {len(shape)} roles, and {' and '.join(others)}: "
                f"add a pattern for it with a role for each axis, or None if the parameter lies as torch keeps it"
            )
        return None

    def knows(self, path: str) -> bool:
        """Whether a pattern matches a path."""
        return any(True for _ in self._of(path))

    def check(self, paths: Sequence[str]) -> None:
        """TensorError for a pattern without a match among the paths. A path itself may be of another part."""
        for pattern, _ in self._patterns:
            if paths and not any(_matches(pattern, path) for path in paths):
                raise TensorError(
                    f"the pattern {pattern!r} of axes matches no parameter{did_you_mean(pattern, paths)}: correct it, "
                    f"or leave it out"
                )


#: Every parameter lies as it is seen.
AS_SEEN = AxisRoles((("*", None),))


def _matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path, as one text or part by part as in a partition."""
    return fnmatchcase(path, pattern) or (all(pattern.split("/")) and matches(pattern, path))


def roles_of(entries: Sequence[tuple[str, Any]]) -> AxisRoles:
    """The roles in users' entries: a path or pattern, and a tuple of roles, dimension numbers of optax, or None.

    Raises HyperError for an entry of another kind, and for an unknown role.
    """
    return AxisRoles(tuple((pattern, _roles(pattern, value)) for pattern, value in entries))


def is_roles(value: Any) -> bool:
    """Whether a value stands for the roles of one parameter."""
    if isinstance(value, str | None) or _has_numbers(value):
        return True
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(word, str) for word in value)


def _has_numbers(value: Any) -> bool:
    return hasattr(value, "reduction_axis") and hasattr(value, "output_axis")


def _roles(pattern: str, value: Any) -> Roles:
    if value is None:
        return None
    if _has_numbers(value):
        sides = (value.reduction_axis, value.output_axis)
        return _Numbers(*((side,) if isinstance(side, int) else tuple(side) for side in sides))
    if isinstance(value, str) or not (is_roles(value) or value == ()):
        raise HyperError(
            f"the axes of {pattern!r} are {value!r}: give a role for each axis, such as ('inputs', 'outputs'), or None "
            f"where it lies as torch keeps it"
        )
    for word in value:
        if word not in ROLES:
            hint = did_you_mean(word, ROLES)
            raise HyperError(f"{word!r} of the axes of {pattern!r} is none of {', '.join(ROLES)}{hint}")
    return tuple(value)


@functools.lru_cache(maxsize=1024)
def reads_layout(rule: Rule) -> bool:
    """Whether a rule, or one under its `otherwise`, takes rows and columns for different things."""
    return any(map(sees_shape, Router(rule).rules))


@functools.lru_cache(maxsize=1024)
def reads_tensors(rule: Rule) -> bool:
    """Whether a rule, or one under its `otherwise`, depends on the bounds between tensors."""
    return any(map(_reads_tensor, Router(rule).rules))


def decomposes(rule: Rule) -> bool:
    """Whether a rule decomposes matrices, where rounding decides between equal eigenvalues."""
    return any(n.op in (Op.EIGH, Op.QR, Op.INVERSE_ROOT, Op.SINGULAR_VECTORS) for n in walk(rule.expressions))


def _reads_tensor(rule: Rule) -> bool:
    if sees_shape(rule) or reads_numbers(rule):
        return True
    if any(state.shape is None and state.per == "tensor" for state in rule.state.values()):
        return True
    values = [*rule.expressions, *(statistic.value for statistic in rule.statistics.values())]
    return any(
        (n.op.kind is Kind.REDUCE and n.arg == "tensor") or (n.op in (Op.NAME, Op.FACT) and n.arg == "numel")
        for n in walk(values)
    )
