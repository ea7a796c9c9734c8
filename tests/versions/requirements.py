"""What pyproject.toml asks for: requirements by extra, and their lowest versions."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent

#: The name of what is always installed, among the extras.
CORE = "core"

#: The extras of a checkout, which constraints.txt has the versions of.
OF_CHECKOUT = ("docs", "dev")


def requirements(root: Path = ROOT) -> dict[str, list[Requirement]]:
    """The requirements of `core` and of every extra but those of a checkout, as pyproject.toml has them."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    parts = {CORE: project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in parts.items() if name not in OF_CHECKOUT}


def floor(requirement: Requirement) -> str:
    """The lowest version that a requirement allows; ValueError where it has no lower bound."""
    for specifier in requirement.specifier:
        if specifier.operator == ">=":
            return specifier.version
    raise ValueError(f"{requirement.name} has no lower bound in pyproject.toml")


def here(extras: Collection[str], root: Path = ROOT) -> Iterator[Requirement]:
    """The requirements of `core` and of the named extras on this system."""
    for name, lines in requirements(root).items():
        if name == CORE or name in extras:
            yield from (line for line in lines if line.marker is None or line.marker.evaluate())


def oldest(extras: Collection[str], root: Path = ROOT) -> list[str]:
    """The constraints of an environment with the lowest versions; the highest floor where two extras name a package."""
    from packaging.version import Version

    floors: dict[str, str] = {}
    for requirement in here(extras, root):
        name, lowest = canonicalize_name(requirement.name), floor(requirement)
        floors[name] = max(floors.get(name, lowest), lowest, key=Version)
    return [f"{name}=={version}" for name, version in floors.items()]


def pins(root: Path = ROOT) -> dict[str, str]:
    """The versions of constraints.txt, by the packages' canonical names."""
    lines = (root / "constraints.txt").read_text().splitlines()
    parts = [line.partition("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, _, version in parts}
