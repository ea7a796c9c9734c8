"""`rulec lsp` in a process of its own, as an editor starts it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from lsprotocol import types
from pygls.lsp.client import LanguageClient

from rulec import extras
from tests.cli.running import process

TEXT = "name: Mine\nsummary: '🙂'\nhyper: {lr: 1e-3, bèta: 0.9}\nstep: |\n  direction = sqr(g)  # 🙂\n"

#: What is said of the text without its mistakes.
WARNING = ("nothing reads the hyper-parameter beta: read it or remove it", types.DiagnosticSeverity.Warning, "unread")


async def session(folder: Path) -> tuple[list[types.Diagnostic], list[str], str, list[types.Diagnostic]]:
    """The diagnostics of a wrong text, what is offered in its step, what a word means, and what a right text has."""
    client = LanguageClient("test", "1")
    published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()

    @client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
    def publish(params: types.PublishDiagnosticsParams) -> None:
        published.put_nowait(params)

    await client.start_io(sys.executable, "-m", "rulec", "lsp")
    await client.initialize_async(types.InitializeParams(types.ClientCapabilities()))
    uri = (folder / "mine.yaml").as_uri()
    client.text_document_did_open(types.DidOpenTextDocumentParams(types.TextDocumentItem(uri, "yaml", 1, TEXT)))
    wrong = (await published.get()).diagnostics
    at = types.TextDocumentIdentifier(uri), types.Position(4, 16)
    items = await client.text_document_completion_async(types.CompletionParams(*at))
    right = TEXT.replace("sqr", "sqrt").replace("è", "e")
    change = [types.TextDocumentContentChangeWholeDocument(right)]
    client.text_document_did_change(
        types.DidChangeTextDocumentParams(types.VersionedTextDocumentIdentifier(2, uri), change)
    )
    after = (await published.get()).diagnostics
    hover = await client.text_document_hover_async(types.HoverParams(*at))
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()
    assert isinstance(items, list)
    assert hover is not None
    assert isinstance(hover.contents, types.MarkupContent)
    return [*wrong], [item.label for item in items], hover.contents.value, [*after]


def test_an_editor_is_served(tmp_path: Path) -> None:
    wrong, offered, meaning, warned = asyncio.run(asyncio.wait_for(session(tmp_path), 120))
    assert [each.message.partition(":")[0] for each in wrong] == ["'bèta' is no name"]
    assert "sqrt" in offered
    assert "sqrt(x)" in meaning
    assert [(each.message, each.severity, each.code) for each in warned] == [WARNING]


def test_without_pygls_the_remedy_is_said() -> None:
    program = "import sys; sys.modules['pygls'] = None; sys.argv = ['rulec', 'lsp']; import rulec.cli; rulec.cli.main()"
    done = process(program=program)
    assert done.returncode == 2
    assert done.stderr == f"error: rulec lsp needs pygls, which is not installed: {extras.command('lsp')}\n"
