"""What installed packages add to rulec by entry points. A fault in one of them stays with its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any

from rulec.errors import RulecError

#: The package of rulec itself.
_RULEC = "rulec"


def points_of(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Name -> the entry points of a group with this name, one or those of several packages; rulec's come alone."""
    points: dict[str, list[EntryPoint]] = {}
    for point in sorted(_points(group)):
        points.setdefault(point.name, []).append(point)
    ours = {name: [point for point in each if package_of(point) == _RULEC] for name, each in points.items()}
    return {name: tuple(ours[name] or each) for name, each in sorted(points.items())}


def _points(group: str) -> Iterator[EntryPoint]:
    """The entry points of a group; packages with unreadable metadata have none."""
    try:
        yield from [*entry_points(group=group)]
    except Exception:  # noqa: BLE001 - what the metadata of others raises
        known = set[str]()
        for package in distributions():
            with suppress(Exception):
                if package.name not in known:  # the first in the path hides others of the name
                    known.add(package.name)
                    yield from package.entry_points.select(group=group)


def package_of(point: EntryPoint) -> str:
    """The name of the package that an entry point is of, or else its value."""
    return point.dist.name if point.dist is not None else point.value


def loaded(what: str, points: tuple[EntryPoint, ...]) -> Any:
    """The object of a name's entry points; `what` is the name with a noun, as `rule 'a'`.

    RulecError where several packages have the name, and where its package cannot be imported, whatever it raises: a
    package cannot end the process by sys.exit.
    """
    if len(points) > 1:
        packages = ", ".join(map(package_of, points))
        raise RulecError(f"several packages add a {what}: uninstall all but one of {packages}")
    return answer(points[0].load, f"{what} of {package_of(points[0])} cannot be loaded")


def answer(function: Callable[[], Any], fault: str) -> Any:
    """The result of a function of others. RulecError, which begins with the `fault`, whatever it raises.

    KeyboardInterrupt alone goes through: it is the user's.
    """
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RulecError(f"{fault}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """What an error says, of whatever class it is."""
    if isinstance(error, SystemExit):
        return f"it would end the process, by sys.exit({'' if error.code is None else repr(error.code)})"
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - its class fails in turn
        return type(error).__name__
