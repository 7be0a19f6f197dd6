"""tasks.json: the tasks that run a job, check a script, and watch a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.debug.vscode import owned
from ddpdoctor.debug.vscode.launch_json import FOLDER, REPORT_TASK, RUN_TASK
from ddpdoctor.debug.vscode.owned import PREFIX, Section

FILE = "tasks.json"

_RUN = ("run", "--wait-for-attach", "--stop-with-debugger", "--output", "problems")
_DEFAULTS = {"version": "2.0.0"}
_MATCHER: Mapping[str, object] = {
    "owner": "ddpdoctor",
    "source": "ddpdoctor",
    "fileLocation": ["autoDetect", FOLDER],
    "pattern": {
        "regexp": r"^(.+?):(\d+):(\d+): (error|warning|info) (DDP\d+) (.*)$",
        "file": 1,
        "line": 2,
        "column": 3,
        "severity": 4,
        "code": 5,
        "message": 6,
    },
}
_BACKGROUND = {
    # Without a pattern that ends the start, VS Code waits for the job itself before it attaches.
    "background": {
        "activeOnStart": True,
        "beginsPattern": "^ddpdoctor: waiting for the ranks to start",
        "endsPattern": "^ddpdoctor: all ranks listening",
    },
}
_REPORT = ("report", "latest", "--output", "problems", "--wait", "10")
"""VS Code takes a background task's problems away when it ends; those of this one stay.

The ranks, and with them the debugger, end a moment before the run has said all that it found.
"""


def installed(text: str | None, words: Sequence[str], cwd: str = "") -> str | None:
    """The text of tasks.json with our tasks.

    Args:
        text: The file; None if there is none.
        words: What the run gets: options of torchrun, the script and its arguments.
        cwd: Where it runs; empty for the workspace.

    Raises:
        JsoncError: The text cannot be edited.
    """
    run = {
        **_process(RUN_TASK, [*_RUN, *words], cwd),
        "isBackground": True,
        "presentation": {"reveal": "always", "panel": "dedicated", "clear": True},
        "problemMatcher": {**_MATCHER, **_BACKGROUND},
    }
    tasks = [
        run,
        {
            **_process(REPORT_TASK, _REPORT, cwd),
            "presentation": {"reveal": "silent", "panel": "dedicated", "clear": True},
            # Stop on a compound ends the focused session twice for VS Code, which then asks which
            # instance of the task to end.
            "runOptions": {"instancePolicy": "silent"},
            "problemMatcher": _MATCHER,
        },
        {**_process(f"{PREFIX}check", ["check"], cwd), "problemMatcher": []},
        {
            **_process(f"{PREFIX}top", ["top"], cwd),
            "presentation": {"reveal": "always", "panel": "dedicated", "focus": True},
            "problemMatcher": [],
        },
    ]
    return owned.rewrite(text, [Section("tasks", "label", tasks, owned.any_name)], _DEFAULTS)


def removed(text: str | None) -> str | None:
    """The text of tasks.json without anything of ours; None if nothing else was in it.

    Raises:
        JsoncError: The text is damaged.
    """
    return owned.rewrite(text, [Section("tasks", "label", [], owned.any_name)], _DEFAULTS)


def _process(label: str, words: Sequence[str], cwd: str) -> Mapping[str, object]:
    task: dict[str, object] = {
        "label": label,
        "type": "process",
        "command": "${command:python.interpreterPath}",
        "args": ["-m", "ddpdoctor", *words],
    }
    return {**task, "options": {"cwd": cwd}} if cwd else task
