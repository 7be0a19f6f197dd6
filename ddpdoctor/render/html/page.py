"""Put the HTML report together: template, style, scripts and data in one file.

The run's data is JSON in an inert element, and the script puts it on the page as text alone. A
content security policy in the file forbids other scripts and styles, and fetching anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.render.terminal import PHASE_COLOURS, SEVERITY_COLOURS, Colour

SCRIPTS = ("elements.js", "series.js", "charts.js", "heatmap.js", "sections.js", "page.js")
"""The scripts in the order in which they run, after the plotting library."""

_LIBRARY = "uplot/"


@lru_cache(maxsize=32)
def _file(name: str) -> str:
    return opening.contents(Path(__file__).parent / name, opening.MOST_SOURCE, links=True).decode()


def page(content: dict[str, Any]) -> str:
    """Return the HTML file.

    Args:
        content: The report, from `ddpdoctor.render.html.content`.
    """
    style = "\n".join((_colours(), _file(_LIBRARY + "uPlot.min.css"), _file("page.css")))
    library = _file(_LIBRARY + "uPlot.iife.min.js")
    script = "\n".join((library, *map(_file, SCRIPTS)))
    parts = {
        "policy": (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "title": html.escape(shown(f"{content['title']} - ddpdoctor")),
        "verdict": html.escape(shown(content["verdict"]["text"])),
        "license": _file(_LIBRARY + "LICENSE"),
        "style": style,
        "script": script,
        # So that the JSON cannot end the element that it is in.
        "data": json_text(_json_safe(content), separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026"),
    }
    # The template is split before the parts are put in, so no part is taken for a placeholder.
    pieces = _file("page.html").split("%%")
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def _json_safe(value: Any) -> Any:
    """Make invisible characters visible, and numbers null that JSON cannot write."""
    if isinstance(value, str):
        return shown(value, "\n\t")
    if isinstance(value, dict):
        return {shown(str(key)): _json_safe(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _colours() -> str:
    """Return the colours of phases and severities as variables, for light, dark and print."""

    def variables(which: int) -> str:
        named: dict[str, Colour] = {**PHASE_COLOURS, **SEVERITY_COLOURS}
        return "".join(f"--{name}:{colour[which]};" for name, colour in named.items())

    light, dark = variables(0), variables(1)
    return (
        f":root{{{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}"
    )
