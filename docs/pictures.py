"""Makes the pictures of the README anew.

python docs/pictures.py
"""

from __future__ import annotations

import asyncio
import re
from itertools import chain, repeat
from pathlib import Path

from ddpdoctor.top.app import TopApp
from ddpdoctor.top.demo import DemoSource
from ddpdoctor.top.view import View

HERE = Path(__file__).parent
NOON = 1_800_014_400.0
"""The demonstration's clock stands still, so that a picture changes only when the monitor does."""


async def top() -> None:
    """``ddpdoctor top --demo``, with the slow rank in full."""
    # Begun a moment ago: the age of what it shows is not zero.
    clock = chain([NOON - 0.1], repeat(NOON))
    app = TopApp(lambda: DemoSource(1.0, clock=lambda: next(clock)), View())
    async with app.run_test(size=(110, 28)) as pilot:
        while not app.drawn.ranks:
            await pilot.pause(0.05)
        await pilot.press("enter")
        while "rank 5 on" not in str(app.drawn.lines):
            await pilot.pause(0.05)
        await pilot.pause(0.3)
        picture = app.export_screenshot(title="ddpdoctor top")
    # The fonts of the viewer, rather than ones that it would have to fetch.
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    picture = re.sub(r"font-family: Fira Code, monospace", "font-family: monospace", picture)
    (HERE / "top.svg").write_text(picture)


if __name__ == "__main__":
    asyncio.run(top())
