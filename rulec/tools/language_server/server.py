"""The language server: pygls between an editor and the questions of this package."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path
from pygls.workspace.position_codec import ServerTextPosition

from rulec import __version__
from rulec.tools.language_server.answers import Mistake, Word, meaning_at, mistakes, names_of, words_at

_KINDS = {
    "function": types.CompletionItemKind.Function, "key": types.CompletionItemKind.Property,
    "rule": types.CompletionItemKind.Module, "name": types.CompletionItemKind.Constant,
}  # fmt: skip


def make_server() -> LanguageServer:
    """A server for rule files in YAML, still without a connection."""
    server = LanguageServer("rulec", __version__)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        _publish(server, params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        _publish(server, params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_COMPLETION)
    def completion(params: types.CompletionParams) -> list[types.CompletionItem]:
        text, position = _text(server, params)
        return [_item(word) for word in words_at(text, position.line, position.character, names_of(text))]

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        text, position = _text(server, params)
        word = meaning_at(text, position.line, position.character, names_of(text))
        return None if word is None else types.Hover(_markdown(word))

    return server


def _text(server: LanguageServer, params: types.CompletionParams | types.HoverParams) -> tuple[str, ServerTextPosition]:
    """The text of a document, and a position in it by characters."""
    document = server.workspace.get_text_document(params.text_document.uri)
    return document.source, document.position_codec.position_from_client_units(document.lines, params.position)


def _publish(server: LanguageServer, uri: str) -> None:
    """Tells the editor all mistakes of a document."""
    document = server.workspace.get_text_document(uri)
    path = to_fs_path(uri)
    here = None if path is None else Path(path).parent
    spans = [(each, _range(each)) for each in mistakes(document.source, here)]
    diagnostics = [
        types.Diagnostic(
            document.position_codec.range_to_client_units(document.lines, span), each.message,
            types.DiagnosticSeverity.Warning if each.warning else types.DiagnosticSeverity.Error,
            code=each.code, source="rulec",
        )
        for each, span in spans
    ]  # fmt: skip
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics))


def _range(mistake: Mistake) -> types.Range:
    start = types.Position(mistake.line, mistake.column)
    return types.Range(start, types.Position(mistake.line, mistake.column + mistake.width))


def _item(word: Word) -> types.CompletionItem:
    kind = _KINDS.get(word.kind, types.CompletionItemKind.Variable)
    return types.CompletionItem(word.name, kind=kind, detail=word.kind, documentation=_markdown(word))


def _markdown(word: Word) -> types.MarkupContent:
    return types.MarkupContent(types.MarkupKind.Markdown, word.meaning)
