"""The hook of MkDocs that adds the gallery and pages of the reference to the site, and mends all pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The place of the cards in docs/gallery.md.
PLACE = "<!-- cards -->"
#: The script that the theme would fetch for the search of a site on disk; the site has it itself.
SHIM = "https://unpkg.com/iframe-worker/shim"
#: The folder that sets formulas; the playground has it too.
KATEX = ROOT / "rulec" / "tools" / "display" / "katex"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds a page for every rule, the pages of `gallery.reference`, and the files that set formulas."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from mkdocs.structure.files import File

    from gallery.build import entries, names
    from gallery.cards import cards
    from gallery.reference import pages

    listed = entries(names())
    for entry in listed:
        files.append(File.generated(config, f"gallery/{entry.slug}.md", content=entry.page))
    for place, content in pages().items():
        files.append(File.generated(config, place, content=content))
    for file in sorted(path for path in KATEX.rglob("*") if path.is_file()):
        target = f"katex/{file.relative_to(KATEX).as_posix()}"
        files.append(File.generated(config, target, abs_src_path=str(file)))
    config.extra["gallery_cards"] = cards(listed)
    return files


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Puts the cards into their page. Empty corners of tables are no headers: screen readers would announce nothing."""
    html = re.sub(r"<th( [^>]*)?></th>", r"<td\1></td>", html)
    return html.replace(PLACE, config.extra["gallery_cards"]) if page.file.src_uri == "gallery.md" else html


def on_post_page(output: str, page: Any, config: Any, **_: Any) -> str:
    """Gives a page the site's own script in place of the fetched one."""
    return output.replace(SHIM, "../" * page.url.count("/") + "javascripts/iframe-worker.js")
