"""The manual's table of code elsewhere that computes something else than what it names."""

from __future__ import annotations

from collections.abc import Iterator

from tests.docs import peers
from tests.docs.table import table


def faults() -> str:
    """A table for each library."""
    from tests.rules.faults import FAULTS
    from tests.rules.faults_elsewhere import READ

    libraries = dict.fromkeys(fault.peer.theirs.rpartition(".")[0].replace(".contrib", "") for fault in FAULTS)
    tables = [part for library in libraries for part in (f"## {library}", _of(library))]
    others = [part for library in READ for part in (f"## {library}", f"Read in {READ[library]}.", _of(library))]
    return "\n\n".join([f"The lines hold for {_versions()}.", *tables, *others])


def _versions() -> str:
    """The versions that the rows were measured with."""
    written = peers.read()["versions"]
    first, *others = (f"{name} {written[name].partition('+')[0]}" for name in ("torch", "optax", "pytorch_optimizer"))
    return f"{', '.join([first, *others[:-1]])} and {others[-1]}"


def _of(library: str) -> str:
    return table(["code", "what it does", "what it should do", "the rule here"], list(_rows(library)))


def _rows(library: str) -> Iterator[list[str]]:
    from tests.rules.faults import CODE_FAULTS, FAULTS
    from tests.rules.faults_elsewhere import ELSEWHERE

    for fault in (*FAULTS, *ELSEWHERE):
        if fault.peer.theirs.startswith(f"{library}."):
            name = fault.peer.theirs.removeprefix(f"{library}.")
            here = fault.peer.composed.replace("transforms/", "").removeprefix("l2 >> ").removesuffix(" + decay")
            yield [f"`{name}`", fault.does, fault.instead, f"`{here}`"]
    for code in CODE_FAULTS:
        if code.theirs.startswith(f"{library}."):
            yield [f"`{code.theirs.removeprefix(f'{library}.')}`", code.does, code.instead, f"`{code.here}`"]


MAKERS = {"faults": faults}
