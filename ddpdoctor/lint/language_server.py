"""``ddpdoctor lsp``: diagnostics, pages and quick fixes for editors that speak LSP.

It needs pygls. Nothing else imports this module.
"""

from __future__ import annotations

from typing import Any

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path
from pygls.workspace import TextDocument

from ddpdoctor import __version__
from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.source_files import imported_files
from ddpdoctor.lint import files
from ddpdoctor.lint.check import Problem, check
from ddpdoctor.lint.fixes import Edit
from ddpdoctor.lint.output import page_of

SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.INFO: types.DiagnosticSeverity.Information,
}


class Server(LanguageServer):
    """Holds the problems of each open document.

    Args:
        least: The lowest severity that is shown.
    """

    def __init__(self, least: Severity = Severity.WARNING) -> None:
        super().__init__("ddpdoctor", __version__)
        self._least = least
        self.problems: dict[str, list[Problem]] = {}

    def check(self, uri: str) -> None:
        """Check a document as it stands in the editor, and publish its problems."""
        document = self.workspace.get_text_document(uri)
        path = to_fs_path(uri) or uri
        source = files.parse(path, document.source.encode())
        # Imported files may create its samplers and loaders.
        others = [files.read(each) for each in imported_files(path) if each != path]
        found = [each for each in check([source, *others]) if each.path == path]
        self.problems[uri] = [each for each in found if each.severity >= self._least]
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(
                uri=uri,
                version=document.version,
                diagnostics=[_diagnostic(document, each) for each in self.problems[uri]],
            )
        )

    def at(self, uri: str, span: types.Range) -> list[Problem]:
        """Return the problems of a document that touch a range of the editor."""
        document = self.workspace.get_text_document(uri)
        return [
            each
            for each in self.problems.get(uri, ())
            if _touch(_diagnostic(document, each).range, span)
        ]


def _touch(one: types.Range, other: types.Range) -> bool:
    return one.start <= other.end and other.start <= one.end


def _position(document: TextDocument, line: int, column: int) -> types.Position:
    """Return a position in the editor's units. Line and column count from 0, in characters."""
    lines = document.lines
    line = min(line, max(len(lines) - 1, 0))
    text = lines[line] if lines else ""
    units = document.position_codec.client_num_units(text[:column])
    return types.Position(line=line, character=units)


def _diagnostic(document: TextDocument, problem: Problem) -> types.Diagnostic:
    return types.Diagnostic(
        range=types.Range(
            start=_position(document, problem.line - 1, problem.column - 1),
            end=_position(document, problem.end_line - 1, problem.end_column - 1),
        ),
        message=f"{problem.message}\n{problem.fix}",
        severity=SEVERITIES[problem.severity],
        code=problem.code,
        source="ddpdoctor",
    )


def _text_edit(document: TextDocument, edit: Edit) -> types.TextEdit:
    lines = document.lines

    def position(line: int, offset: int) -> types.Position:
        text = lines[line - 1] if line <= len(lines) else ""
        return _position(document, line - 1, len(text.encode()[:offset].decode("utf-8", "ignore")))

    span = types.Range(start=position(*edit.start), end=position(*edit.end))
    return types.TextEdit(range=span, new_text=edit.text)


def serve(least: Severity) -> None:
    """Serve one editor on stdin and stdout until it ends."""
    make(least).start_io()


def make(least: Severity) -> Server:
    """Return a server with its features."""
    server = Server(least)

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        server.check(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        server.check(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: types.DidSaveTextDocumentParams) -> None:
        # Other open documents may import it.
        for uri in list(server.problems):
            server.check(uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        server.problems.pop(params.text_document.uri, None)
        nothing = types.PublishDiagnosticsParams(uri=params.text_document.uri, diagnostics=[])
        server.text_document_publish_diagnostics(nothing)

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        span = types.Range(start=params.position, end=params.position)
        found = server.at(params.text_document.uri, span)
        pages = "\n\n".join(f"{each.code}: {page_of(each.code)}" for each in found)
        content = types.MarkupContent(kind=types.MarkupKind.PlainText, value=pages)
        return types.Hover(contents=content) if found else None

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix]),
    )
    def actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        document = server.workspace.get_text_document(uri)
        found: list[Any] = [each for each in server.at(uri, params.range) if each.edits]
        return [
            types.CodeAction(
                title=each.fix,
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[_diagnostic(document, each)],
                is_preferred=True,
                edit=types.WorkspaceEdit(
                    changes={uri: [_text_edit(document, edit) for edit in each.edits]}
                ),
            )
            for each in found
        ]

    return server
