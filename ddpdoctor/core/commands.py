"""The commands of ddpdoctor with their one-line help."""

from __future__ import annotations

import sys
from pathlib import Path

COMMANDS = {
    "run": "Start a distributed job, watch it, and report what is wrong.",
    "lint": "Find misuse of DDP in training code without running it.",
    "lsp": "Serve an editor what lint finds, by the Language Server Protocol.",
    "check": "Check before a job starts whether it can run here, and between nodes.",
    "top": "Watch a live run: which rank is slow, where, and what its GPU does.",
    "scale": "Run a job at several sizes, and say what keeps it from scaling.",
    "parity": "Compare the training of a job on one rank with that on several.",
    "replay": "Compute a kept step of a rank again, in one process.",
    "debug": "Debug the ranks of a live run at a prompt, all at once.",
    "eval": "Evaluate an expression in the ranks of a live run, without stopping them.",
    "profile": "Profile the same steps of the ranks of a live run, in one trace.",
    "attach": "Show where a debugger attaches to the ranks of live runs.",
    "stacks": "Show where the ranks of a live run are in the code, merged into one tree.",
    "vscode": "Write VS Code's launch.json and tasks.json for a job.",
    "report": "Show a finished run (text, HTML, trace), or diagnose a plain log.",
    "compare": "Compare two runs: speed, memory, what changed; a gate for CI.",
    "runs": "List your runs: status, age, size, verdict; remove old ones.",
    "mcp": "Serve an AI assistant by the Model Context Protocol: runs, findings, stacks.",
    "explain": "Explain a finding by its code or name.",
    "completion": "Print the script by which a shell completes commands and options.",
}

_PROGRAM = (
    "import sys; sys.path = [each for each in sys.path if each]; sys.path.append(sys.argv.pop(1)); "
    "from {} import main; sys.exit(main(sys.argv[1:]))"
)


def in_own_process(*words: str, module: str = "ddpdoctor.cli") -> list[str]:
    """Return the command that runs ddpdoctor in another process of this Python.

    The working directory is not on its path, since a script's own ``json.py`` may be there. The
    ``main`` of ``module`` reads the words.
    """
    here = str(Path(__file__).parents[2])
    return [sys.executable, "-c", _PROGRAM.format(module), here, *words]
