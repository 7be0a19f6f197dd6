"""The generated pages of the documentation site: links, code, and what a search can find."""

from __future__ import annotations

import posixpath
import re

import pytest

from ddpdoctor.commands.explain import entries
from ddpdoctor.failures.table import TABLE
from tests.conftest import ROOT
from tools.site_pages import FAMILIES, llms, pages, rule_page, with_links_of

PAGES = pages()


def test_every_code_has_a_page_and_a_family() -> None:
    for code, entry in entries().items():
        page = PAGES[f"rules/{code}.md"]
        assert page.startswith(f"# {code} {entry.name}\n")
        assert entry.summary in page.replace("[", "").replace("]", "")
        assert f"[{code}]({code}.md)" in PAGES["rules/index.md"]
        assert any(code.startswith(prefix) for prefix in FAMILIES)


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_to_pages(path: str) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", PAGES[path], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            where = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            assert where in PAGES or (ROOT / "docs" / where).exists(), target


def test_blocks_of_code_are_closed() -> None:
    for path, text in PAGES.items():
        assert text.count("```") % 2 == 0, path


def test_an_example_is_code() -> None:
    block = "```python\nif rank == 0:\n    save(model)\ndist.barrier()\n```"
    assert block in rule_page("DDP401")


def test_a_failure_is_found_by_the_text_of_its_error() -> None:
    assert "\n### `init.cc:943 NCCL WARN Duplicate GPU detected" in rule_page("DDP203")
    index = PAGES["errors.md"]
    codes = {failure.code for failure in TABLE} - {"DDP900"}
    assert all(f"](rules/{code}.md) |" in index for code in codes)


def test_assistants_find_each_page_in_llms_txt() -> None:
    found = llms([{"Home": "index.md"}, {"More": ["rules/index.md", {"Run": "run.md"}]}])
    assert found.splitlines()[-3:] == [
        "- [Home](./): ddpdoctor", "- [Rules](rules/)", "- [Run](run/): Run a job"
    ]  # fmt: skip


def test_each_page_of_docs_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert all(str(path.relative_to(docs)) in nav for path in docs.rglob("*.md"))


def test_links_of_a_guide_lead_to_pages_or_become_text() -> None:
    text = "[a](../docs/check.md#x), [b](../SECURITY.md), ![c](../docs/top.svg), [d](../LICENSE)"
    assert with_links_of("benchmarks/README.md", text) == (
        "[a](check.md#x), [b](security.md), ![c](top.svg), d"
    )
