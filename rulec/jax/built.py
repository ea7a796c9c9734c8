"""Functions of optax's names that are more than the keywords of one rule: each is built by a function of ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optax

from rulec.functional.axes import AxisRoles

#: From the keywords of optax's function, all of them, to the transformation.
Build = Callable[[Mapping[str, Any]], optax.GradientTransformationExtraArgs]


@dataclass(frozen=True)
class Built:
    """A function of optax and the builder of its transformation; `rule` is the rule of the library it is a form of."""

    name: str
    rule: str
    summary: str
    otherwise: str
    build: Build
    #: The keyword of optax's function that says which axes are rows, and its value from the roles of axes; or None.
    axes: tuple[str, Callable[[AxisRoles], Any]] | None
    #: optax's own function, as it was before anybody put another in its place.
    theirs: Callable[..., Any]

    @property
    def signature(self) -> inspect.Signature:
        """The signature of optax's function."""
        return inspect.signature(self.theirs)


#: Name, such as `adafactor` or `contrib.muon` -> what builds it.
BUILT: dict[str, Built] = {}


def built(
    name: str, rule: str, otherwise: str, axes: tuple[str, Callable[[AxisRoles], Any]] | None = None
) -> Callable[[Build], Build]:  # fmt: skip
    """Registers the builder of a function of optax; `otherwise` names the difference between optax and the rule."""

    def enter(build: Build) -> Build:
        theirs = functools.reduce(getattr, name.split("."), optax)
        summary = (build.__doc__ or "").strip().splitlines()[0]
        BUILT[name] = Built(name, rule, summary, otherwise, build, axes, theirs)
        return build

    return enter
