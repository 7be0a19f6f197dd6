"""``ddpdoctor lsp``: the language server of ``ddpdoctor lint``."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.options import Parser, one_of

PARSER = Parser(
    "lsp",
    """\
Usage: ddpdoctor lsp [OPTIONS]

Serve an editor by the Language Server Protocol on stdin and stdout: what
`ddpdoctor lint` finds in open files, with the rules' pages and quick fixes.
Needs pygls: pip install 'ddpdoctor[lsp]'.

Options:
  --severity LEVEL  Show what is at least as severe: info, warning, error
                    [default: warning].
  -h, --help        Show this text.
""",
    {"--severity": one_of("info", "warning", "error")},
)


def main(words: Sequence[str]) -> int:
    """Serve one editor until it ends."""
    given = PARSER.read(words)
    if given.rest:
        raise DoctorError("lsp takes no file", "an editor tells it which files are open")
    try:
        from ddpdoctor.lint.language_server import serve
    except ImportError as error:
        raise DoctorError(
            f"lsp needs pygls 2: {error}", "install it: pip install 'ddpdoctor[lsp]'"
        ) from None
    serve(Severity[given.get("--severity", "warning").upper()])
    return 0
