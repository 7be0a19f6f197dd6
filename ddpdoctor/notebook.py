"""IPython magics for notebooks: ``%load_ext ddpdoctor``, then ``%%ddp --nproc 2`` in a cell.

The cell becomes a script that ``ddpdoctor run`` starts. Its output appears as it is written, its
findings when it has ended.
"""

from __future__ import annotations

import ast
import atexit
import codecs
import contextlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import IO, Any

from IPython.core.error import UsageError
from IPython.display import display

from ddpdoctor.api import examine, read_run
from ddpdoctor.core.commands import in_own_process
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import shown
from ddpdoctor.render import console, reporter
from ddpdoctor.run import names, rundir
from ddpdoctor.system.proc import end_with_parent

_FOLDER = "ddp-cells-"
_COLOURS = {"error": "#c62828", "warning": "#b26a00", "info": "#00796b"}

_STARTERS = frozenset({"notebook_launcher", "debug_launcher", "start_processes", "ddp_notebook"})
"""Names and words in code that starts its ranks itself: of Accelerate, torch and Lightning."""

_UNWATCHED = """\
ddpdoctor: the ranks of this cell are not watched. Put all that they need into one %%ddp cell, or \
start Jupyter with: ddpdoctor run --quiet -- jupyter lab
"""

_FUTURE = re.compile(r"^from __future__ import [\w, ]+$", re.MULTILINE)


class Findings:
    """What was found in a run. A notebook shows it as HTML, a terminal as text.

    Args:
        path: The run directory.
        cells: Numbers of the notebook's cells by the names that IPython gave to their code.
    """

    def __init__(self, path: Path, cells: Mapping[str, int]) -> None:
        run = read_run(path)
        found = examine(run)
        written = console.written_before(run)
        self._found = [(each.severity.label, _text(each, written, cells)) for each in found]
        self._summary = [*reporter.summary_lines(run), reporter.findings_count(found)]
        self._summary[-1] += f"; ddpdoctor report {run.path} --html report.html"

    def __repr__(self) -> str:
        return "".join(text for _, text in self._found) + shown("\n".join(self._summary), "\n")

    def _repr_html_(self) -> str:
        parts = []
        for severity, text in self._found:
            head, _, rest = text.partition("\n  ")
            parts.append(
                f'<details open style="border-left:4px solid {_COLOURS[severity]};'
                f'padding-left:10px;margin:6px 0"><summary style="cursor:pointer">'
                f"<b>{escape(head)}</b></summary>"
                f'<pre style="white-space:pre-wrap;margin:4px 0">  {escape(rest)}</pre></details>'
            )
        lines = "<br>".join(escape(shown(line)) for line in self._summary)
        return f'<div>{"".join(parts)}<div style="opacity:.75">{lines}</div></div>'


def _text(finding: Finding, written: float, cells: Mapping[str, int]) -> str:
    """Return a finding as text, in which cells are named by their numbers."""
    text = console.render(finding, colour=False, width=100, written=written)
    for name, number in cells.items():
        place = re.escape("/".join(Path(name).parts[-2:]))  # Of a path that may be relative
        text = re.sub(rf"\S*{place}", f"cell-{number}.py", text)
    return re.sub(rf"\S*{_FOLDER}\w+/", "", re.sub(r"\| import sys; .*# %%ddp", "| %%ddp", text))


def load_ipython_extension(shell: Any) -> None:
    """Define ``%%ddp`` and ``%ddp``, and recognize cells that fork ranks from the notebook."""
    scripts = tempfile.mkdtemp(prefix=_FOLDER)
    atexit.register(shutil.rmtree, scripts, ignore_errors=True)
    # Of the cells that a kernel runs itself. Private, from IPython 7.23 on.
    cells: Mapping[str, int] = getattr(shell.compile, "_filename_map", {})

    def ddp(line: str, cell: str | None = None) -> None:
        """Run a cell as a DDP job and show its findings; as ``%ddp [RUN]`` show those of a run."""
        try:
            if cell is None:
                newest = line.strip() or rundir.newest_first()[0]
                display(Findings(rundir.find(str(newest)), cells))
                return
            # The number of this cell. IPython 9 counts on before it runs, older ones afterwards.
            number = len(shell.user_ns["In"]) - 1
            _run(line, cell, Path(scripts, f"cell-{number}.py"))
        except DoctorError as error:
            raise UsageError(shown(str(error))) from None
        except IndexError:
            raise UsageError("there is no run yet; %%ddp starts one") from None

    shell.register_magic_function(ddp, "line_cell", "ddp")
    shell.events.register("pre_run_cell", _warn)


def _warn(info: Any) -> None:
    """Say of a cell that starts ranks outside of ``%%ddp`` that they are not watched."""
    if names.MARK not in os.environ and _starts_ranks(info.raw_cell):
        sys.stderr.write(_UNWATCHED)


def _starts_ranks(code: str) -> bool:
    """Return whether code starts its ranks itself."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)):
            word = getattr(node, "id", None) or getattr(node, "attr", None)
            word = node.value if isinstance(node, ast.Constant) else word
            if word in _STARTERS or (isinstance(node, ast.Attribute) and word == "spawn"):
                return True
    return False


def _run(line: str, cell: str, script: Path) -> None:
    """Run a cell.

    Raises:
        UsageError: The cell is no Python, or the job failed.
    """
    script.write_text(_script(line, cell))
    try:
        ast.parse(script.read_text())
    except SyntaxError as error:
        hint = "; a %%ddp cell is a plain script, without lines that begin with % or !"
        raise UsageError(f"line {error.lineno} of the cell: {error.msg}{hint}") from None
    words = shlex.split(line)
    at = words.index("--") if "--" in words else len(words)
    # torchrun itself takes the short name for ambiguous, before Python 3.12.
    options = [re.sub(r"^--nproc(?==|$)", "--nproc-per-node", word) for word in words[:at]]
    arguments = words[at + 1 :]
    start = [sys.executable] if _starts_ranks(cell) else []
    log = script.with_suffix(".jsonl")
    command = in_own_process(
        "run", "--no-vscode", "--quiet", "--json", str(log), *options,
        "--", *start, str(script), *arguments,
    )  # fmt: skip
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Jupyter interrupts the kernel's group. Only one SIGINT may come to the job.
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    interrupted = _pass_through(process)
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = json.loads(log.read_text().splitlines()[-1])
        display(Findings(rundir.find(last["run"]), {}))
    if interrupted:
        raise UsageError("interrupted; the job has ended")
    if process.returncode:
        raise UsageError(f"the job ended with status {process.returncode}")


def _script(line: str, cell: str) -> str:
    """Return the cell as a script whose lines have the numbers that the notebook shows.

    In place of the magic stands what lets the cell import from the notebook's directory.
    """
    future = _FUTURE.findall(cell)
    first = "; ".join([*future, "import sys", f"sys.path[0] = {os.getcwd()!r}"])
    return f"{first}  # %%ddp {line}\n{_FUTURE.sub(lambda each: f'# {each[0]}', cell)}"


def _pass_through(process: subprocess.Popen[bytes]) -> bool:
    """Write the job's output below the cell until it ends. Returns whether it was interrupted."""
    interrupted = False
    output = _output(process)
    while True:
        try:
            for stream, text in output:
                stream.write(text)
                stream.flush()
            process.wait()
            return interrupted
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
            output = _output(process)


def _output(process: subprocess.Popen[bytes]) -> Iterator[tuple[Any, str]]:
    """Yield what the job writes, with the stream it is for."""
    assert process.stdout is not None and process.stderr is not None
    decoder = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as selector:
        pipes: list[tuple[IO[bytes], Any]] = [
            (process.stdout, sys.stdout),
            (process.stderr, sys.stderr),
        ]
        for pipe, stream in pipes:
            selector.register(pipe, selectors.EVENT_READ, (stream, decoder("replace")))
        while selector.get_map():
            for key, _ in selector.select():
                stream, decode = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                yield stream, decode.decode(data, final=not data)
