"""Makes the manual's outputs and tables anew: `python -m tests.docs.refresh [PAGE ...]`.

Outputs that still agree stay as they are, and so do those that are shortened: what they would be is printed. Read what
changed before committing it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.generated import MAKERS
from tests.docs.markdown import ROOT, Block, blocks, pages, with_generated, with_outputs
from tests.docs.running import PageRun


def refreshed(path: Path) -> str:
    """The text of a page with every generated part and output as it is now, up to the first block that fails."""
    text = with_generated(path.read_text(), MAKERS)
    outputs: dict[Block, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for outcome in PageRun(path.stem, Path(folder)).run(blocks(text)):
                if outcome.agrees:
                    continue
                if outcome.shown is not None and outcome.shown.shortened:
                    place = f"{path.relative_to(ROOT)}:{outcome.shown.first + 1}"
                    print(f"{place}: shortened by hand, and prints now\n{outcome.printed}", file=sys.stderr)
                else:
                    outputs[outcome.shown or outcome.block] = outcome.printed
        except AssertionError as error:
            print(f"{path.relative_to(ROOT)}: {error}", file=sys.stderr)
    return with_outputs(text, outputs)


def main(names: list[str]) -> None:
    """Refreshes the named pages, or all: `rules.md` and `docs/rules.md` name the same page."""
    chosen = {Path(name).name for name in names}
    for path in pages():
        if not names or path.name in chosen:
            text = refreshed(path)
            if text != path.read_text():
                path.write_text(text)
                print(f"changed {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
