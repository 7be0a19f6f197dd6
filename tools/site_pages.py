"""The pages of the documentation site that are not written by hand: a hook of MkDocs.

``mkdocs build`` calls the functions ``on_...``. The page of a rule or a check comes
from its docstring, with the messages that it is recognised by, so that a search for a code or for
the text of an error finds it. The guides at the root of the repository become pages as they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpdoctor.commands.explain import entries

ROOT = Path(__file__).parent.parent

GUIDES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "sample_jobs/README.md": "sample_jobs.md",
    "ddpdoctor/commands/mcp_skill.md": "mcp_skill.md",
}
"""Files outside ``docs/`` and the pages that they become."""

FAMILIES = {
    "DDP0": "Machine and nodes",
    "DDP1": "Data and samplers",
    "DDP2": "Launch",
    "DDP3": "Model and optimizer",
    "DDP4": "Control flow",
    "DDP5": "Checkpoints",
    "DDP6": "Speed",
    "DDP7": "Divergence",
    "DDP8": "Hangs",
    "DDP9": "Crashes",
}

_LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)


def on_config(config: Any) -> Any:
    """Add the rule pages to the navigation, by family."""
    families = [
        {title: [f"rules/{code}.md" for code in entries() if code.startswith(prefix)]}
        for prefix, title in FAMILIES.items()
    ]
    rules = next(item for item in config.nav if "Rules" in item)
    rules["Rules"] = ["rules/index.md", *families]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add all generated pages to those of ``docs/``."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """All generated pages in Markdown, by their paths below ``docs/``."""
    guides = {
        page: with_links_of(source, (ROOT / source).read_text()) for source, page in GUIDES.items()
    }
    rules = {f"rules/{code}.md": rule_page(code) for code in entries()}
    return {**guides, "rules/index.md": index(), **rules}


def with_links_of(source: str, text: str) -> str:
    """A guide whose relative links lead to pages of the site; to other files they become text."""

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        page = GUIDES.get(target, target.removeprefix("docs/"))
        if target not in GUIDES and not target.startswith("docs/"):
            return link[1].strip("![]")
        return f"{link[1]}({page}{link[3] or ''})"

    return _LINK.sub(moved, text)


def index() -> str:
    """The list of all rules and checks."""
    lines = ["# Rules", "", "`ddpdoctor explain CODE` prints the same pages in a terminal.", ""]
    for prefix, title in FAMILIES.items():
        lines += [f"## {title}", "", "| code | name | severity | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| [{code}]({code}.md) | {entry.name} | {entry.kind} | {entry.summary} |"
            for code, entry in entries().items()
            if code.startswith(prefix)
        ]
        lines.append("")
    return "\n".join(lines)


def rule_page(code: str) -> str:
    """The page of a rule or a check in Markdown."""
    known = entries()
    entry = known[code]
    lines = [f"# {code} {entry.name}", "", f"*{entry.kind}*", "", *_markdown(entry.page)]
    if entry.messages:
        lines += ["", "## Messages", "", "Recognised in a log by:", ""]
        lines += [f"- `{message}`" for message in entry.messages]
    return _linked("\n".join(lines) + "\n", code, known)


def _markdown(page: str) -> Iterator[str]:
    """A page's sections as headings, its examples as blocks of code."""
    fenced = False
    for line in page.splitlines():
        code = line.startswith(" " * 8)
        if code != fenced:
            yield from ("", "```python") if code else ("```", "")
            fenced = code
        if code:
            yield line[8:]
        elif line and not line.startswith(" ") and line != page.partition("\n")[0]:
            yield f"## {line}"
        else:
            example = re.match(r"\s+(Wrong|Right)\b(.*)", line)
            yield f"\n**{example[1]}**{example[2]}" if example else line.strip()
    if fenced:
        yield "```"


def _linked(text: str, own: str, known: Mapping[str, object]) -> str:
    """The text with codes of other pages as links, but not those in code."""

    def link(found: re.Match[str]) -> str:
        code = found[0]
        return f"[{code}]({code}.md)" if code != own and code in known else code

    parts = _CODE.split(text)
    return "".join(
        part if part.startswith("`") else re.sub(r"DDP\d{3}\b", link, part) for part in parts
    )
