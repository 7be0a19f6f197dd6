"""Names, addresses and secrets taken out of findings, so that they can be posted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from ddpdoctor.core.finding import Finding, Location

_SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|wandb_v1_)[\w-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+|\b[0-9a-f]{40}\b"
)
_ASSIGNED = re.compile(
    r"(?i)(\b\w{0,40}(?:token|api_?key|secret|passw(?:or)?d|authorization)\w{0,40}[\"']?\s*[=:]\s*[\"']?"
    r"(?:Bearer )?)[^\s\"',;&]{4,}|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+\b")
_USER = re.compile(
    r"(?i)(?<=[/\\])(?P<folder>(?:home|users?|scratch)"
    # Clusters sort their users: /home/users/d/a/name, /users/9/name, /home/userexternal/name.
    r"(?:[/\\]+(?:home|users?|userexternal|scratch|students?|staff|grads?|\w|\d+)"
    r"(?=[/\\]+[^/\\\s\"':,]+[/\\]))*)"
    r"(?P<sign>[/\\]+)(?P<name>[^/\\\s\"':,]+)(?P<below>(?:[/\\][^/\\\s\"':,()]{1,255}){0,40}[/\\])?"
)
_ACCOUNTS = frozenset(
    (
        *("admin", "coder", "ec2-user", "jovyan", "root", "runner", "ubuntu", "user", "vscode"),
        *("data", "project", "projects", "public", "share", "shared", "work", "workspace"),
    )
)
"""That a machine comes with, or all share: the name of no person, and a word like any other."""

_PATH = re.compile(
    r"(?<![\w.:/<>\\-])(?=/)"
    r"(?!/(?:usr|opt|lib|lib64|bin|etc|proc|sys|dev|pytorch|home|[Uu]sers?|\.\.\.)/)"
    r"(?![^\s\"':,()]{0,300}<)(?P<below>(?:/[^/\s\"':,()]{1,255}){2,40}/)(?=[^/\s\"':,()])"
)
"""Anywhere else a folder may bear a name as well: /nfs/data/alice/job/train.py."""

_DEEP = 3
"""Folders of which the last is shown: those before it may be a group's and a user's."""

_ADDRESS = re.compile(
    r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)"
    r"|(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}:?[0-9a-f]{0,4}(?:%\w+)?(?![\w:])|\bfe80::[0-9a-f:]+"
)
_HOST = re.compile(
    r"\b(?:srun: error: |task \d+ on |Node failure on |slurmstepd-| ON |host\s+: |hostname[=: ]+"
    r"|[Hh]ost |ssh |client_addr=|connect to (?:any network address of )?\(?"
    r"|addresses of \(|a process of )"
    r"(?P<after>(?!any\b|the\b|host\b)[A-Za-z][\w.-]*)"
    r"|^(?P<before>[A-Za-z][\w.-]*)(?=:\d+:\d+ \[\d+\] )"
    r"|(?<![\w.@/-])"
    r"(?P<full>[a-z][\w-]*(?:\.[\w-]+)*\.(?:internal|local|lan|cluster|edu|corp|svc))\b"
)
_KEPT = frozenset(("localhost", "pod"))


class Redactor:
    """Replaces names, the same by the same everywhere.

    Args:
        texts: What else was printed, which may show that a word is a name.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        for text in texts:
            self.text(text)

    def finding(self, finding: Finding) -> Finding:
        """A finding without names, addresses and secrets."""
        place = finding.location
        # All of it is read first: a name may stand where only another line shows that it is one.
        for text in (finding.message, *finding.evidence, finding.traceback):
            self.text(text)
        return replace(
            finding,
            message=self.text(finding.message),
            evidence=tuple(map(self.text, finding.evidence)),
            fix=self.text(finding.fix),
            paste=self.text(finding.paste),
            traceback=self.text(finding.traceback),
            location=None if place is None else Location(self.text(place.path), place.line),
        )

    def text(self, text: str) -> str:
        """A text without them."""
        text = _SECRET.sub("<secret>", text)
        text = _ASSIGNED.sub(lambda found: f"{found[1] or ''}<secret>", text)
        text = _MAIL.sub(self._by("mail"), text)
        text = _PATH.sub(lambda found: _shortened(found["below"]), _USER.sub(self._home, text))
        text = _ADDRESS.sub(self._by("address"), text)
        for found in _HOST.finditer(text):
            name = next(each for each in found.groups() if each is not None)
            if name.lower() not in _KEPT:
                self._name("host", name)
        for name, shown in self._names.items():
            if name in text:
                text = re.sub(rf"(?<![\w<]){re.escape(name)}(?![\w>])", shown, text)
        return text

    def _home(self, found: re.Match[str]) -> str:
        name = found["name"]
        if name.lower() not in _ACCOUNTS:
            name = self._name("user", name)
        below = _shortened(found["below"]) if found["below"] else ""
        return f"{found['folder']}{found['sign']}{name}{below}"

    def _by(self, kind: str) -> Callable[[re.Match[str]], str]:
        return lambda found: self._name(kind, found[0])

    def _name(self, kind: str, name: str) -> str:
        if name.startswith("<"):
            return name
        if name not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[name] = f"<{kind}-{self._counts[kind]}>"
        return self._names[name]


def _shortened(folders: str) -> str:
    """The end of a path: what tells where a line is, and not whose it is."""
    sign = folders[-1]
    each = [one for one in re.split(r"[/\\]", folders) if one]
    if "..." in each:
        return folders
    packages = [at for at, one in enumerate(each) if one in ("site-packages", "dist-packages")]
    first = packages[0] if packages else len(each) - (len(each) >= _DEEP)
    return sign.join(("", *(["..."] if first else []), *each[first:], ""))
