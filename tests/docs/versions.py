"""The versions of other libraries that the manual's tables hold for: `python -m tests.docs.versions` names changes.

Installed libraries were compared by the tests, and their versions are written with the measurements. Others were read
at a version; where a package index has them, it is asked for the newest one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version

from tests.docs import peers
from tests.docs.names_table import libraries

#: Libraries of the table of names, and the packages that they are in.
PACKAGE_OF = {
    "torch.optim": "torch", "optax": "optax", "optax.contrib": "optax", "pytorch_optimizer": "pytorch_optimizer",
}  # fmt: skip


def public(number: str) -> str:
    """A version without its build: `2.13.0` of `2.13.0+cpu`."""
    return number.partition("+")[0]


def newest(package: str) -> str:
    """The newest release of a package that pip's index has; empty where there is no answer."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(rf"^{re.escape(package)} \((.+?)\)", found.stdout, re.MULTILINE)
    return match.group(1) if match else ""


def changed(newest: Callable[[str], str] = newest, installed: Callable[[str], str] = version) -> Iterator[str]:
    """A sentence for each library whose version is another than the one written."""
    for package, written in peers.read()["versions"].items():
        if public(here := installed(package)) != public(written):
            yield (
                f"{package} {here} is installed, and docs/data/peers.json was measured with {written}: measure again "
                "with `python -m tests.docs.peers`, which names the rows that moved"
            )
    for name, library in libraries().items():
        if not library.version:
            continue
        release = newest(library.package) if library.package else ""
        if not release:
            yield f"{name} was read at {library.version} on {library.read}: no index says whether there is a newer one"
        elif release != library.version:
            yield (
                f"{name} {release} is out, and tests/docs/names_elsewhere.yaml was read at {library.version}: read it, "
                "compare what that file names as compared, and write the version and the day there"
            )


def main() -> None:
    """Prints what has changed."""
    for sentence in changed():
        print(sentence)


if __name__ == "__main__":
    main()
