"""Build ddpdoctor, and try what was built: ``python -m tools.try_wheel``.

Builds an sdist and a wheel with ``python -m build``, checks them with ``twine check``, and installs
them into a bare environment of each Python from 3.10 to 3.14 that is on PATH or in pyenv: the wheel
where it fits, else the sdist, which is then built there. In each, a few commands have to run, with
the compiled core and without it. With wheels as arguments, these are tried instead of built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PURE = "DDPDOCTOR_PURE_PYTHON"
"""Set: nothing is compiled at build time, and nothing compiled is used at run time."""

COMPILED = ("ddpdoctor.probe.runtime._hot", "ddpdoctor.failures._present")

COMMANDS = (
    ("--version",),
    ("--help",),
    ("run", "--help"),
    ("explain", "DDP610"),
    ("check", "--only", "memory,limits,launch-environment"),
    ("report", "--log", "job.log"),
    ("top", "--demo", "--once"),
)
STATUSES = {"check": (0, 1, 2), "report": (1, 2)}
"""Exit statuses of commands that report what they find on the machine, or in the log."""

LOG = "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"

SCHEMAS = " ".join(sorted(each.name for each in (ROOT / "ddpdoctor" / "schemas").iterdir()))

SCRIPT = """
import importlib.util, json, sys
from importlib.resources import files
import ddpdoctor
assert "site-packages" in ddpdoctor.__file__, ddpdoctor.__file__
assert ddpdoctor.examine and ddpdoctor.read_run and ddpdoctor.Finding
root = files("ddpdoctor")
assert root.joinpath("py.typed").is_file()
schemas = {each.name for each in root.joinpath("schemas").iterdir() if json.loads(each.read_text())}
assert schemas == set(sys.argv[1].split()), schemas
print(*(name for name in sys.argv[2:] if importlib.util.find_spec(name)))
"""


def run(*words: str | Path, cwd: Path | None = None, **env: str) -> str:
    """Run a command and return its output.

    Raises:
        SystemExit: It failed; its output is shown.
    """
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", PURE)}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**given, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    allowed = STATUSES.get(str(words[1]) if len(words) > 1 else "", (0,))
    if done.returncode not in allowed or "Traceback" in done.stdout:
        sys.exit(f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def pythons() -> Iterator[tuple[str, str]]:
    """The interpreters to try, one of each version: the version and the path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    for version in VERSIONS:
        named = shutil.which(f"python{version}")
        found = [
            sys.executable,
            *([named] if named else []),
            *pyenv.glob(f"{version}.*/bin/python"),
        ]
        for path in filter(None, map(str, found)):
            # A shim of pyenv fails if its version is not chosen.
            asked = subprocess.run([path, "-c", question], capture_output=True, text=True)
            if asked.returncode == 0 and asked.stdout.strip() == version:
                yield version, path
                break


def build(into: Path, *options: str, **env: str) -> list[Path]:
    """Build, check, and return what was built."""
    run(sys.executable, "-m", "build", *options, "--outdir", into, cwd=ROOT, **env)
    built = sorted(into.iterdir())
    print(run(sys.executable, "-m", "twine", "check", "--strict", *built).strip())
    return built


def try_in(version: str, python: str, files: Sequence[Path], scratch: Path) -> None:
    """Install the first of the files that fits into a bare environment, and start it."""
    home = scratch / version
    run(python, "-m", "venv", home)
    pip = (home / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    tag = f"cp{version.replace('.', '')}-"
    file = next(
        (each for each in files if tag in each.name or "-none-any" in each.name),
        next((each for each in files if each.name.endswith(".tar.gz")), None),
    )
    if file is None:
        print(f"Python {version}: no wheel for it")
        return
    run(*pip, file)
    work = scratch / f"work-{version}"  # Not the checkout, which Python would import instead.
    work.mkdir()
    (work / "job.log").write_text(LOG)
    core = run(home / "bin" / "python", "-c", SCRIPT, SCHEMAS, *COMPILED, cwd=work).split()
    if core and len(core) != len(COMPILED):
        sys.exit(f"Python {version}: {file.name} has {core} alone")
    for pure in ("", "1") if core else ("",):
        env = {PURE: pure} if pure else {}
        for words in COMMANDS:
            run(home / "bin" / "ddpdoctor", *words, cwd=work, **env)
    how = "compiled core, also without it" if core else "pure Python"
    print(f"Python {version}: {file.name} installs and starts ({how})")
    shutil.rmtree(home)


def main() -> None:
    """Build, and try in each Python."""
    parser = argparse.ArgumentParser(prog="try_wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="*", type=Path, help="wheels to try; none: build them")
    parser.add_argument("--outdir", type=Path, help="keep what is built in this directory")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        found = list(pythons())
        files = [each.resolve() for each in asked.wheels]
        if not files:
            files = build(scratch / "dist")
        for version, python in found:
            try_in(version, python, files, scratch)
        if not asked.wheels:
            # Where there is no C compiler the wheel is one for all Pythons.
            pure = build(scratch / "pure", "--wheel", **{PURE: "1"})
            assert pure[0].name.endswith("-py3-none-any.whl"), pure
            (scratch / "again").mkdir()
            try_in(*found[0], pure, scratch / "again")
            for tool in (("uvx", "--from"), ("pipx", "run", "--spec")):
                if shutil.which(tool[0]):
                    run(*tool, pure[0], "ddpdoctor", "--version", cwd=scratch)
                    print(f"{tool[0]} starts it")
        if asked.outdir is not None:
            asked.outdir.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy2(file, asked.outdir)


if __name__ == "__main__":
    main()
