"""The pages of the documentation site that are not written by hand: a hook of MkDocs.

``mkdocs build`` calls the functions ``on_...``. The page of a rule or a check comes
from its docstring, with the messages that it is recognised by, so that a search for a code or for
the text of an error finds it. An index lists these messages with their pages. The guides at the
root of the repository become pages as they are. ``llms.txt`` lists all pages for AI assistants.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpdoctor.commands.explain import entries
from ddpdoctor.failures.entry import Failure
from ddpdoctor.failures.table import TABLE

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

MAX_MESSAGE = 140  # Characters of a message in a list

_PREFIX = re.compile(r"^(?:(?:\[[^]]*\] *)+(?=\w)|\S+:\d+:\d+ \[\d+\] )")
"""What loggers and NCCL write in front of a message."""

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

    for path, text in {**pages(), "llms.txt": llms(config.nav)}.items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """All generated pages in Markdown, by their paths below ``docs/``."""
    guides = {
        page: with_links_of(source, (ROOT / source).read_text()) for source, page in GUIDES.items()
    }
    rules = {f"rules/{code}.md": rule_page(code) for code in entries()}
    return {
        **guides,
        "symptoms/index.md": symptoms(),
        "errors.md": errors(),
        "rules/index.md": index(),
        **rules,
    }


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


def symptoms() -> str:
    """The list of the pages by symptom, each with the words that users have for it."""
    lines = ["# What is wrong with my job?", ""]
    for path in sorted((ROOT / "docs" / "symptoms").glob("*.md")):
        text = path.read_text()
        words = " · ".join(re.findall(r"^> (.*?) *$", text, re.MULTILINE))
        lines += [f"**[{_title(text)}]({path.name})**", "", words, ""]
    return "\n".join([*lines, "Or search for [the text of the error](../errors.md).", ""])


def errors() -> str:
    """The index of error messages, each with the page of its code."""
    known = entries()
    rows = {
        (message, failure.code)
        for failure in TABLE
        for message in _messages(failure)
        if failure.code != "DDP900"
    }
    lines = [
        "# Error messages", "",
        "What is printed, and the page that explains it. Names and numbers are examples.",
        "`ddpdoctor explain \"TEXT\"` takes a message as it stands in your log, and",
        "`ddpdoctor report --log FILE` the whole log.", "", "| message | page |", "| --- | --- |",
    ]  # fmt: skip
    for message, code in sorted(rows, key=lambda row: (row[0].lower(), row[1])):
        lines.append(f"| {_quoted(message)} | [{code} {known[code].name}](rules/{code}.md) |")
    return "\n".join([*lines, ""])


def _messages(failure: Failure) -> Iterator[str]:
    """The line of each example that has the text by which the failure is known."""
    for example in failure.examples:
        lines = [line.strip() for line in example.splitlines() if line.strip()]
        telling = [line for line in lines if failure.regex.search(line)]
        line = _PREFIX.sub("", (telling or lines[-1:])[0])
        yield line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


def _quoted(text: str) -> str:
    """Text as code in a cell of a table."""
    return (f"`` {text} ``" if "`" in text else f"`{text}`").replace("|", "\\|")


def llms(nav: Any) -> str:
    """The list of all pages but those of rules, for AI assistants: https://llmstxt.org."""
    made = pages()

    def listed(items: Any) -> Iterator[str]:
        for item in items:
            for name, where in item.items() if isinstance(item, dict) else [("", item)]:
                if not isinstance(where, str):
                    yield from listed(where)
                elif not where.startswith("rules/DDP"):
                    title = _title(made.get(where) or (ROOT / "docs" / where).read_text())
                    address = re.sub(r"(index)?\.md$", "", where).rstrip("/")
                    note = f": {title}" if name and name != title else ""
                    yield f"- [{name or title}]({address or '.'}/){note}"

    return "\n".join([_LLMS, *listed(nav), ""])


_LLMS = """\
# ddpdoctor

> A debugger and diagnostics toolkit for PyTorch DistributedDataParallel jobs. It names the rank,
> the line, the cause and the fix when a job does not start, hangs, crashes, is slow or trains
> wrong.

How an assistant works with it, in one page: [mcp_skill](mcp_skill/), or `ddpdoctor mcp --skill`.
As tools of an assistant: `ddpdoctor mcp`. A code is explained at `rules/CODE/`, such as
[DDP403](rules/DDP403/), and by `ddpdoctor explain CODE`.

## Pages
"""


def _title(page: str) -> str:
    """The first heading of a page."""
    return next(line[2:] for line in page.splitlines() if line.startswith("# "))


def rule_page(code: str) -> str:
    """The page of a rule or a check in Markdown."""
    known = entries()
    entry = known[code]
    lines = [f"# {code} {entry.name}", "", f"*{entry.kind}*", "", *_markdown(entry.page)]
    messages = [each for failure in TABLE if failure.code == code for each in _messages(failure)]
    if messages:
        lines += ["", "## Messages", "", "Recognised in a log by, for example:", ""]
        # The search weighs the words of headings most.
        lines += [f"### {_quoted(message)}\n" for message in messages]
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
