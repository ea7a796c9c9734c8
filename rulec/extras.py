"""Extras of rulec: their packages, the missing packages, and the command that installs an extra.

rulec may be installed from a checkout, a wheel, a repository or an index. PEP 610 records which in `direct_url.json`,
and the command names the same source.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rulec.errors import MissingExtra


@contextmanager
def needing(user: str, *extras: str) -> Iterator[None]:
    """Within the block, a package that cannot be imported is a MissingExtra: `user` needs it, and `extras` have it.

    The sentence names all packages of the extras that are missing, not only the first one.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top in ("", "rulec", "rulec_backends", "rulec_rules"):
            raise
        raise MissingExtra(sentence(user, *extras, package=top)) from None


def sentence(user: str, *extras: str, package: str) -> str:
    """`rulec play needs starlette and uvicorn, which are not installed: pip install ...`.

    `package` is the package known to be missing; it is named where the metadata of the extras lack none.
    """
    names = missing(*extras) or [package]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{user} needs {listed}, which {'are' if len(names) > 1 else 'is'} not installed: {command(*extras)}"


def missing(*extras: str) -> list[str]:
    """The missing packages of these extras by name, in the order of pyproject.toml."""
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements(*extras)]
    return [name for name in dict.fromkeys(names) if not _installed(name)]


def requirements(*extras: str) -> list[str]:
    """The requirements of these extras on this platform, such as `starlette>=0.40`."""
    rulec = _rulec()
    chosen = []
    for text in (rulec and rulec.requires) or ():
        requirement, _, marker = text.partition(";")
        platform = re.search(r"""sys_platform == ['"](\w+)['"]""", marker)
        extra = re.search(r"""extra == ['"]([\w-]+)['"]""", marker)
        if extra and extra[1] in extras and (platform is None or platform[1] == sys.platform):
            chosen.append(requirement.strip())
    return chosen


def command(*extras: str) -> str:
    """The command that installs rulec with these extras, from the source of this installation.

    `rulec[race]` stands for an index. A folder or wheel that is no longer there is passed over: then the
    requirements themselves are named.
    """
    words = ["-e"] if (_source().get("dir_info") or {}).get("editable") else []
    place = _place(",".join(extras))
    if place is None:
        return " ".join(["pip install", *map(quote, requirements(*extras))])
    return " ".join(["pip install", *words, quote(place)])


def _place(extras: str) -> str | None:
    """pip's argument for rulec with these extras; None for a source that has gone."""
    source = _source()
    address, vcs = source.get("url", ""), source.get("vcs_info")
    if not address:
        return f"rulec[{extras}]"
    if vcs:
        return f"rulec[{extras}] @ {vcs['vcs']}+{address}@{vcs['commit_id']}"
    if not address.startswith("file:"):
        return f"rulec[{extras}] @ {address}"
    path = url2pathname(urlsplit(address).path)
    if not os.path.exists(path):
        return None
    return f"{'.' if os.path.samefile(path, os.curdir) else path}[{extras}]"


def _source() -> dict[str, Any]:
    """The record of PEP 610: the address that rulec was installed from; empty for an index.

    A checkout that runs without being installed counts as a folder.
    """
    rulec = _rulec()
    if rulec is not None:
        recorded: dict[str, Any] = json.loads(rulec.read_text("direct_url.json") or "{}")
        return recorded
    folder = Path(__file__).resolve().parent.parent
    return {"url": folder.as_uri(), "dir_info": {}} if os.path.isfile(folder / "pyproject.toml") else {}


def _rulec() -> Distribution | None:
    try:
        return distribution("rulec")
    except PackageNotFoundError:
        return None


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
