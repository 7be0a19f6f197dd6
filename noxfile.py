"""Sessions for contributors: ``nox -l`` lists them, ``nox -s lint`` runs one.

uv makes the environments where it is installed, else virtualenv.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "docs", "package"]
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints.txt")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = {"2.4": "torch==2.4.*", "2.8": "torch==2.8.*", "newest": "torch"}
TOO_OLD = {("3.13", "2.4"), ("3.14", "2.4"), ("3.14", "2.8")}
"""Pythons for which a version of torch has no wheels."""

MATRIX = [
    (python, torch) for python in PYTHONS for torch in TORCHES if (python, torch) not in TOO_OLD
]


@nox.session
@nox.parametrize("python,torch", MATRIX)
def tests(session: nox.Session, torch: str) -> None:
    """The tests that are not slow; arguments after -- go to pytest."""
    # Of what constraints.txt holds, the versions of torch and numpy are other ones here.
    session.install("-e", ".[dev]", TORCHES[torch])
    options = session.posargs or ["-n", "4", "--dist", "loadfile"]
    session.run("python", "-m", "pytest", "-q", *options)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy and import-linter."""
    session.install(*CONSTRAINTS, "-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, into site/; -- serve shows it and follows changes."""
    session.install(*CONSTRAINTS, "-e", ".[docs]")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session
def package(session: nox.Session) -> None:
    """Build sdist and wheel, check them, and start them in bare environments of each Python."""
    session.install("build", "twine")
    session.run("python", "-m", "tools.try_wheel", *session.posargs)


@nox.session
def rule(session: nox.Session) -> None:
    """Lay out a new rule: nox -s rule -- DDP999 shouted-loss."""
    session.install(*CONSTRAINTS, "-e", ".")
    session.run("python", "-m", "tools.new_rule", *session.posargs)
